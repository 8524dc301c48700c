"""How a trained network stands what it was not trained for: turned images and attacks (section 5.4, "Robustness").

A protocol is a row of `PROTOCOLS`; a grid names it, and `san robustness` takes any checkpoints through it.
"""

from __future__ import annotations

from experiments.grid import ProtocolName
from experiments.robustness import attack, rotation
from experiments.robustness.protocol import Protocol

PROTOCOLS: dict[ProtocolName, Protocol] = {"rotation": rotation.PROTOCOL, "attack": attack.PROTOCOL}
