"""Which files of a data set cannot be decoded."""

from collections.abc import Iterator, Sequence
from pathlib import Path


def broken_images(root: Path, paths: Sequence[str]) -> Iterator[str]:
    """Those of `paths` (relative to `root`) that are missing or no images, in order; decodes on the CPU."""
    begin = 0
    while begin < len(paths):
        good = _decodable(root, paths[begin:])
        if begin + good < len(paths):
            yield paths[begin + good]
        begin += good + 1


def _decodable(root: Path, paths: Sequence[str]) -> int:
    """How many paths decode before one fails; a failure costs the pipeline, so the caller comes again."""
    from pipelines import graph

    names = ([graph.encode_name(str(root / path))] for path in paths)
    pipeline = graph.decoding_pipeline(names)
    for good in range(len(paths)):
        try:
            pipeline.run()
        except RuntimeError:
            return good
    return len(paths)
