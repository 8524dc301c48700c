"""The protocols by name: robustness to rotated images and to attacks (section 5.4 of the paper, "Robustness")."""

from __future__ import annotations

from experiments.evaluation import attack, rotation
from experiments.evaluation.protocol import Protocol
from experiments.grids.grid import ProtocolName

PROTOCOLS: dict[ProtocolName, Protocol] = {"rotation": rotation.PROTOCOL, "attack": attack.PROTOCOL}
