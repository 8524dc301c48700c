"""Names of the authors' released code (github.com/hszhao/SAN) for our parameters, so that its numbers can be matched."""

from __future__ import annotations

import re

# Ours -> theirs, first match wins. `{0}` is the stage or the rest of the name, in order of the groups.
RENAMES = (
    (r"stem\.(.*)", "conv_in.{0}"),
    (r"stem_norm\.(.*)", "bn_in.{0}"),
    (r"head\.(.*)", "fc.{0}"),
    (r"stages\.(\d+)\.linear\.(.*)", "conv{0}.{1}"),
    (r"stages\.(\d+)\.norm\.(.*)", "bn{0}.{1}"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.norm([12])\.(.*)", "layer{0}.{1}.bn{2}.{3}"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.linear\.(.*)", "layer{0}.{1}.conv.{2}"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attention\.phi\.(.*)", "layer{0}.{1}.sam.conv1.{2}"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attention\.psi\.(.*)", "layer{0}.{1}.sam.conv2.{2}"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attention\.beta\.(.*)", "layer{0}.{1}.sam.conv3.{2}"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attention\.gamma\.(.*)", "layer{0}.{1}.sam.conv_w.{2}"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attention\.position\.linear\.(.*)", "layer{0}.{1}.sam.conv_p.{2}"),
)


def released_key(key: str) -> str:
    """The released code's name of one of our state-dict keys.

    Raises:
        ValueError: a key that SAN models do not have.
    """
    for ours, theirs in RENAMES:
        match = re.fullmatch(ours, key)
        if match:
            return theirs.format(*match.groups())
    raise ValueError(f"{key!r} is not a parameter of a SAN model")
