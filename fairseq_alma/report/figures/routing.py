"""Maps that show which expert of a mixture receives which test images, as in the first version of the paper.

t-SNE gives each image a position, so that similar images are close to each other. The colour of an image shows its
expert. The gates, which route the images to the experts, form a tree. The tree is drawn on top of the images.

A map is drawn from the routing files of a run. The file stages/stage_k/routing.npz in the run folder contains test
images, and the expert of each image after stage k.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_alma.core.errors import RunError
from fairseq_alma.report.figures.style import WIDTH, add_note, best_by_validation
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, RunGroup

MAX_STAGES = 4
"""Maximum number of stages in a routing map. Each stage has a separate panel."""
MAX_EXAMPLES = 1500
"""Maximum number of test images in a routing map. t-SNE needs about one second for a few hundred."""
MIN_EXAMPLES = 10
"""Minimum number of examples (test images) in a routing map."""
_PERPLEXITY = 30
"""The parameter `perplexity` of t-SNE: roughly the number of neighbours that t-SNE considers for each example."""
# The markers of the experts, as matplotlib names. If there are more experts than markers, the markers repeat.
_MARKERS = "os^Dv<>Pp*Xd"

Tree = int | list
"""A tree of gates. Each gate routes an example to one of its branches: to another gate, or to an expert.

In the tree, a gate is represented by the list of its branches, and an expert by its index.
"""


def routing_maps(comparison: Comparison, numbers: Sequence[Numbers]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield (file name without suffix, function that draws the routing map) for each group of runs with routing files.

    If more than MAX_GROUPS groups have routing files, only the groups with the best validation scores get a map.
    """
    has_routing = [i for i, group in enumerate(comparison.groups) if group.counted_runs[0].routing_files()]
    for number, i in enumerate(best_by_validation(has_routing, numbers), start=1):
        group = comparison.groups[i]
        yield f"experts_{number}", partial(routing_map, group, comparison.label_of(group))


def routing_map(group: RunGroup, title: str) -> Figure:
    """Draw the routing map of a group of runs, with one panel per stage. The map shows the first run of the group.

    Each test image is drawn at its t-SNE position, in the colour and with the marker of its expert. The position of an
    image is the same in all panels. The expert of an image can change from stage to stage.

    The index of an expert is drawn where its images are densest. A gate is drawn in the middle of its branches.

    Raises:
        RunError: if a routing file is damaged or contains too few examples.
    """
    files = group.counted_runs[0].routing_files()
    if len(files) > MAX_STAGES:  # choose evenly spaced stages, including the first and the last stage
        files = [files[round(i * (len(files) - 1) / (MAX_STAGES - 1))] for i in range(MAX_STAGES)]
    routings = [(k, _read_routing(path)) for k, path in files]
    num_examples = min(len(routing["expert"]) for _, routing in routings)
    if num_examples < MIN_EXAMPLES:
        raise RunError(
            f"{files[0][1]} contains the routing of {num_examples} examples only, too few to draw the routing map: "
            f"at least {MIN_EXAMPLES} test images are needed"
        )
    positions = _embed(routings[0][1]["images"][:num_examples])
    figure = Figure(figsize=(WIDTH * len(routings) + 0.4, WIDTH + 0.6), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(routings), squeeze=False)[0]
    for axes, (k, routing) in zip(panels, routings, strict=True):
        expert = routing["expert"][: len(positions)]
        used = np.unique(expert)
        few = len(used) <= 10
        colours = colormaps["tab10"](range(10)) if few else colormaps["turbo"](np.linspace(0, 1, len(used)))
        for number, used_expert in enumerate(used):
            axes.scatter(
                *positions[expert == used_expert].T, s=5, color=colours[number],
                marker=_MARKERS[number % len(_MARKERS)], linewidth=0, alpha=0.75,
            )  # fmt: skip
        num_experts = routing["weights"].shape[1]
        tree = gate_tree(routing["root"].item(), routing["splits"].tolist(), num_experts)
        _draw_tree(axes, tree, positions, expert)
        count = f"{num_experts} experts" if num_experts > 1 else "1 expert"
        axes.set_title(f"stage {k}: {count}, {len(used)} in use", fontsize=9)
        axes.set(xticks=[], yticks=[])
    figure.suptitle(title, fontsize=9)
    note = f"t-SNE of {len(positions)} test images; colour and marker: expert in the first mixture; lines: gates"
    add_note(figure, note)
    return figure


def gate_tree(root: int, splits: Sequence[int], num_experts: int) -> Tree:
    """Return the tree of gates of a mixture layer that grew by splitting experts.

    A split replaces an expert by a gate with two branches: the old expert and a new one. The new expert gets the next
    free index.

    Args:
        root: number of branches that the first gate had before the first split; 0 if the layer began with a single
            expert and no gate. If one gate chooses among all experts, `root` is the number of experts.
        splits: for each split, the index of the expert that was split.
        num_experts: number of experts of the layer, to check the tree.

    Raises:
        RunError: if the tree does not have `num_experts` experts.
    """
    tree: Tree = list(range(root)) if root > 1 else 0
    count = max(1, root)

    def split(node: Tree, expert: int, new_expert: int) -> Tree:
        """Return the tree `node` after `expert` was replaced by a gate with the branches `expert` and `new_expert`."""
        if isinstance(node, list):
            return [split(branch, expert, new_expert) for branch in node]
        return [node, new_expert] if node == expert else node

    for expert in splits:
        tree = split(tree, expert, count)
        count += 1
    if count != num_experts:
        raise RunError(
            f"the tree of gates has {count} experts, but the mixture has {num_experts}: a routing.npz of the run is "
            f"damaged, or another release wrote it. Remove the routing.npz files of the run to make the report without "
            f"its routing map"
        )
    return tree


def _draw_tree(axes: Axes, tree: Tree, positions: np.ndarray, expert: np.ndarray) -> None:
    """Draw the tree of gates on top of the images. An expert that receives no image is left out.

    `positions` are the t-SNE positions of the images, [images, 2], and `expert` the index of their expert, [images].
    """
    radius = np.ptp(positions, axis=0).max() / 12
    leaves = {int(leaf): _densest_position(positions[expert == leaf], radius) for leaf in np.unique(expert)}

    def draw(node: Tree) -> np.ndarray | None:
        """Draw a gate and all gates below it. Return its position, or that of an expert; None if it has no images."""
        if not isinstance(node, list):
            return leaves.get(node)
        branches = [position for branch in node if (position := draw(branch)) is not None]
        if not branches:
            return None
        middle = np.mean(branches, axis=0)
        for position in branches:
            axes.plot(*np.stack([middle, position]).T, color="black", linewidth=0.9, zorder=4)
        axes.plot(*middle, "s", color="white", markeredgecolor="black", markersize=5, zorder=5)
        return middle

    draw(tree)
    for leaf, (x, y) in leaves.items():
        axes.annotate(
            str(leaf), (x, y), fontsize=7, ha="center", va="center", zorder=6,
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "black", "linewidth": 0.6},
        )  # fmt: skip


def _densest_position(positions: np.ndarray, radius: float) -> np.ndarray:
    """Return that of the positions [images, 2] of an expert which has the most others within the distance `radius`.

    The mean is not used: if the images form several clusters, it may lie between them, where the expert has none.
    """
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    return positions[(distances < radius).sum(axis=1).argmax()]


def _embed(images: np.ndarray) -> np.ndarray:
    """Return the t-SNE positions of the first MAX_EXAMPLES images, [images, 2], from 50 principal components."""
    # Import sklearn only when a map is drawn, because the import takes a second and most reports have no map.
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    pixels = images[:MAX_EXAMPLES].reshape(min(len(images), MAX_EXAMPLES), -1).astype(np.float32) / 255
    if min(pixels.shape) > 50:
        pixels = PCA(50, random_state=0).fit_transform(pixels)
    # Reduce the perplexity if there are few images, because t-SNE requires a perplexity below the number of images.
    perplexity = min(_PERPLEXITY, max(2, (len(pixels) - 1) // 3))
    return TSNE(init="pca", random_state=0, perplexity=perplexity).fit_transform(pixels)


def _read_routing(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a routing file (routing.npz). Raise RunError if it is damaged."""
    names = ("images", "expert", "weights", "root", "splits")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except Exception as error:  # catch all errors, because zipfile, zlib and numpy raise many types for a damaged file
        raise RunError(
            f"{path} cannot be read ({error!r}): remove this file to draw the routing map without it"
        ) from error
