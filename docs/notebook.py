"""Runs a notebook without Jupyter, for the site and the tests, and writes it as a page with its outputs."""

from __future__ import annotations

import ast
import base64
import html
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from matplotlib import pyplot


def as_markdown(path: Path) -> str:
    """The text, the code and the outputs of a notebook. Raises what a cell raises."""
    names: dict[str, Any] = {"__name__": "__main__"}
    parts = []
    pyplot.close("all")  # an open figure of this process is not one of the notebook
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts += [source] if cell["cell_type"] == "markdown" else [f"```python\n{source}\n```", *_outputs(source, names)]
    return "\n\n".join(parts) + "\n"


def _outputs(source: str, names: dict[str, Any]) -> list[str]:
    """Runs a cell. Returns what it prints, the value of its last expression, and its figures, like Jupyter."""
    tree, value, printed = ast.parse(source), None, io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, "<notebook>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<notebook>", "eval"), names)
    outputs = [f"```text\n{printed.getvalue().rstrip()}\n```"] if printed.getvalue() else []
    if hasattr(value, "to_html"):  # a DataFrame; the site styles tables without a class
        outputs.append(value.to_html(border=0, float_format="{:.3g}".format).replace(' class="dataframe"', ""))
    elif value is not None:
        outputs.append(f"```text\n{value!r}\n```")
    outputs += [_image(pyplot.figure(number)) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return outputs


def _image(figure: Any) -> str:
    """A figure as a PNG within the page; its description is the figure's label, the argument `num` of pyplot's functions."""
    png = io.BytesIO()
    figure.savefig(png, dpi=120)
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img alt="{html.escape(figure.get_label())}" src="data:image/png;base64,{data}">'
