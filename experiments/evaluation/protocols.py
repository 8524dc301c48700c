"""How a trained network stands what it was not trained for: turned images and attacks (section 5.4, "Robustness").

A protocol is a row of `PROTOCOLS`; a grid names it, and `san robustness` takes any checkpoints through it.
"""

from __future__ import annotations

from experiments.evaluation import attack, rotation
from experiments.evaluation.protocol import Protocol
from experiments.grids.grid import ProtocolName

PROTOCOLS: dict[ProtocolName, Protocol] = {"rotation": rotation.PROTOCOL, "attack": attack.PROTOCOL}
