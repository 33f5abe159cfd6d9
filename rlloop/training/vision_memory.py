"""Memory of a vision tower, from its shape: of training it, and of making features alone where it is frozen.

D: width; F: the MLP's; H: heads; M: patches of a feature; O: a feature's width; L: deepstack's features; b: bytes of a
number. Every block is made again in the backward pass.
"""

from __future__ import annotations

from rlloop.models.architecture import VisionConfig

WIDE, INDEX = 4, 8  # bytes of a float32 and of a row's index
CORNERS = 4  # learned positions that one patch interpolates


def features(vision: VisionConfig, itemsize: int, trains: bool) -> int:
    """Bytes of a feature's 1 + L vectors; of a tower that trains their gradient too, and one that is added to it."""
    return itemsize * (1 + len(vision.deepstack)) * vision.out_size * (3 if trains else 1)


def inputs(vision: VisionConfig, itemsize: int) -> int:
    """Bytes a patch of blocks' inputs that a tower that trains saves, which may wait in host memory: two parts each,
    2 b D, or one where it is the first or follows deepstack. What a merger of deepstack reads as well is in `kept`."""
    deep = [at for at in vision.deepstack if at + 1 < vision.depth]
    return itemsize * (2 * vision.depth - 1 - 2 * len(deep)) * vision.hidden_size


def kept(vision: VisionConfig, itemsize: int) -> int:
    """Bytes a patch that a tower that trains saves beside: the patch b C and its corners' rows and shares 12 x 4; of
    each merger its input, norm, and both sides of GELU 4 b D."""
    mergers = 1 + len(vision.deepstack)
    return itemsize * (vision.patch_width + 4 * mergers * vision.hidden_size) + (INDEX + WIDE) * CORNERS


def block(vision: VisionConfig, itemsize: int) -> int:
    """Bytes a patch that one block saves for its backward, its input's sum included: sums and norms 4 b D, queries and
    keys 2 b D, what makes them and the values 3 b D, what is read b D and its log-sum-exp 4 H, both sides of GELU
    2 b F."""
    return itemsize * (10 * vision.hidden_size + 2 * vision.intermediate_size) + WIDE * vision.num_heads


def block_backward(vision: VisionConfig, itemsize: int) -> int:
    """Bytes a patch of a block's backward, beside `block`, where it holds most: in its MLP, gradients of its output's
    two parts and of one side of GELU."""
    return itemsize * (2 * vision.hidden_size + vision.intermediate_size)


def forward(vision: VisionConfig, itemsize: int) -> int:
    """Bytes a patch of making features without gradients: the patches, and the larger of the interpolated positions
    (four of b D, the same weighted in float32, and two sums, beside the embedded patch) and a block's MLP."""
    width = vision.hidden_size
    positions = itemsize * (CORNERS + 1) * width + WIDE * (CORNERS + 2) * width
    inner = itemsize * (4 * width + 2 * vision.intermediate_size)
    attended = itemsize * 9 * width
    return itemsize * vision.patch_width + max(positions, inner, attended)
