"""What experts see: their load over time, and the first version's map of test digits with the tree of gates over it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_alma.core.errors import RunError
from fairseq_alma.report.figures.style import FEW_ARRIVALS, HEIGHT, WIDTH, note_below
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, Run, Seed, label_of

MOST_RUNS = 4
"""Of one figure, best by validation."""
MOST_STAGES = 4
MOST_EXAMPLES = 1500
"""Of a map: t-SNE takes a second for every few hundred."""
FEWEST_EXAMPLES = 10
_PERPLEXITY = 30
_MARKS = "os^Dv<>Pp*Xd"


def expert_loads(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Share of the validation data each expert got, stage by stage, in the first and the last mixture; overflow below.

    Of each run the first seed.
    """
    mixtures = [
        i
        for i, run in enumerate(comparison.runs)
        if any(len(layer) > 1 for layers in run.counted[0].loads.values() for layer in layers)
    ]
    mixtures = _best(mixtures, numbers)
    if not mixtures:
        return None
    seeds = [comparison.runs[i].counted[0] for i in mixtures]
    has_overflow = [bool(np.nanmax(np.nan_to_num(seed.overflow)) > 0) for seed in seeds]
    num_layers = max(max(map(len, seed.loads.values())) for seed in seeds)
    num_columns = min(2, num_layers) + any(has_overflow)
    figure = Figure(
        figsize=(WIDTH * num_columns + 0.8, (HEIGHT - 0.6) * len(seeds) + 0.4), layout="constrained", dpi=150
    )
    panels = figure.subplots(len(seeds), num_columns, squeeze=False)
    for row, (i, seed) in zip(panels, zip(mixtures, seeds, strict=True), strict=True):
        title = label_of(comparison.runs[i], comparison.varied)
        layers = [0] if num_layers == 1 else [0, -1]
        for axes, layer in zip(row, layers, strict=False):
            image = _load_map(axes, seed, layer)
            which = "first mixture" if layer == 0 else "last mixture"
            axes.set_title(title if layer == 0 and num_columns == 1 else f"{title}\n{which}", fontsize=8)
            figure.colorbar(image, ax=axes, label="load / even load").ax.tick_params(labelsize=7)
        if any(has_overflow):
            trained = seed.stage > 0
            row[-1].plot(
                np.flatnonzero(trained), 100 * seed.overflow[trained], color="#D55E00", marker=".", linewidth=1
            )
            row[-1].set(ylim=(0, None))
            row[-1].set_ylabel("overflow, % of tokens", fontsize=8)
            row[-1].set_xlabel("mega-batches arrived", fontsize=8)
            row[-1].tick_params(labelsize=7)
            row[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def load_map(seed: Seed, layer: int) -> tuple[list[int], np.ndarray]:
    """(t of the updates, [experts, updates]): the load of an expert times the number of experts, so that 1 is even."""
    times = sorted(seed.loads)
    layers = [seed.loads[t][layer] for t in times]
    table = np.full((max(map(len, layers)), len(times)), np.nan)
    for column, load in enumerate(layers):
        table[: len(load), column] = np.array(load) * len(load)
    return times, table


def _load_map(axes: Axes, seed: Seed, layer: int):
    times, table = load_map(seed, layer)
    edges = np.array([*times, 2 * times[-1] - times[-2] if len(times) > 1 else times[-1] + 1], float)
    if times[-1] <= FEW_ARRIVALS:
        edges -= 0.5  # an arrival is the middle of its column
    image = axes.pcolormesh(
        edges, np.arange(len(table) + 1) - 0.5, table, cmap="viridis", vmin=0, vmax=max(2.0, np.nanmax(table))
    )
    axes.set_ylabel("expert", fontsize=8)
    axes.set_xlabel("mega-batches arrived", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    return image


def routing_maps(
    comparison: Comparison, numbers: Sequence[Numbers]
) -> Iterator[tuple[str, Callable[[], Figure]]]:  # fmt: skip
    """(name of the file, what draws it) of the best runs by validation that wrote down how they route test examples."""
    with_routing = [i for i, run in enumerate(comparison.runs) if run.counted[0].routings()]
    for number, i in enumerate(_best(with_routing, numbers), start=1):
        yield (
            f"experts_{number}",
            partial(routing_map, comparison.runs[i], label_of(comparison.runs[i], comparison.varied)),
        )


def routing_map(run: Run, title: str) -> Figure:
    """t-SNE of test examples, each with the colour and mark of its expert, the tree of gates over it, growth by growth.

    The map is of the images, one for all panels: what changes is who takes which part. A leaf of the tree stands where
    its expert's examples lie thickest, a gate in the middle of its branches.

    Raises:
        RunError: a routing file is damaged.
    """
    routings = run.counted[0].routings()
    if len(routings) > MOST_STAGES:  # before and after growths: evenly, the first and the last among them
        routings = [routings[round(i * (len(routings) - 1) / (MOST_STAGES - 1))] for i in range(MOST_STAGES)]
    loaded = [(k, _read(path)) for k, path in routings]
    count = min(len(routing["expert"]) for _, routing in loaded)  # a continued run may have been told another number
    if count < FEWEST_EXAMPLES:
        raise RunError(f"{routings[0][1]} holds {count} examples: too few for a map; give routing_examples=1000")
    places = _embed(loaded[0][1]["images"][:count])
    figure = Figure(figsize=(WIDTH * len(loaded) + 0.4, WIDTH + 0.6), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(loaded), squeeze=False)[0]
    for axes, (k, routing) in zip(panels, loaded, strict=True):
        expert = routing["expert"][: len(places)]
        used = np.unique(expert)
        for number, one in enumerate(used):
            mine = expert == one
            axes.scatter(
                *places[mine].T, s=5, color=_colour(number, len(used)), marker=_MARKS[number % len(_MARKS)],
                linewidth=0, alpha=0.75,
            )  # fmt: skip
        num_experts = routing["weights"].shape[1]
        _draw_tree(axes, gate_tree(routing["root"].item(), routing["splits"].tolist(), num_experts), places, expert)
        what = f"{num_experts} experts" if num_experts > 1 else "1 expert"
        axes.set_title(f"stage {k}: {what}, {len(used)} in use", fontsize=9)
        axes.set(xticks=[], yticks=[])
    figure.suptitle(title, fontsize=9)
    note_below(
        figure, f"t-SNE of {len(places)} test images; colour and mark: its expert in the first mixture; lines: gates"
    )
    return figure


Tree = int | list
"""A leaf is its expert; a gate is the list of its branches."""


def gate_tree(root: int, splits: Sequence[int], num_experts: int) -> Tree:
    """The tree of gates: `root` branches at first (0: one expert), then each of `splits` halved an expert in turn.

    The new half is the next expert. A flat softmax has a root of all its experts.
    """
    tree: list = [list(range(root))] if root > 1 else [0]
    count = max(1, root)

    def halve(node: Tree, expert: int, new: int) -> Tree:
        if isinstance(node, list):
            return [halve(branch, expert, new) for branch in node]
        return [node, new] if node == expert else node

    for expert in splits:
        tree = [halve(tree[0], expert, count)]
        count += 1
    if count != num_experts:
        raise RunError(
            f"a tree of {count} experts for {num_experts}: the routing file is damaged, or of another release"
        )
    return tree[0]


def _draw_tree(axes: Axes, tree: Tree, places: np.ndarray, expert: np.ndarray) -> None:
    leaves = {
        int(one): _thickest(places[expert == one], np.ptp(places, axis=0).max() / 12) for one in np.unique(expert)
    }

    def place(node: Tree) -> np.ndarray | None:
        if not isinstance(node, list):
            return leaves.get(node)
        branches = [at for branch in node if (at := place(branch)) is not None]
        if not branches:
            return None
        middle = np.mean(branches, axis=0)
        for at in branches:
            axes.plot(*np.stack([middle, at]).T, color="black", linewidth=0.9, zorder=4)
        axes.plot(*middle, "s", color="white", markeredgecolor="black", markersize=5, zorder=5)
        return middle

    place(tree)
    for one, at in leaves.items():
        axes.annotate(
            str(one), (at[0], at[1]), fontsize=7, ha="center", va="center", zorder=6,
            bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "black", "linewidth": 0.6},
        )  # fmt: skip


def _thickest(places: np.ndarray, radius: float) -> np.ndarray:
    """The place with the most others within `radius`. An expert may have several classes: their mean is no one's."""
    distances = np.linalg.norm(places[:, None] - places[None], axis=-1)
    return places[(distances < radius).sum(axis=1).argmax()]


def _embed(images: np.ndarray) -> np.ndarray:
    """[n, 2]: t-SNE of the pixels, by way of their first 50 principal components as its authors advise."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    pixels = images[:MOST_EXAMPLES].reshape(min(len(images), MOST_EXAMPLES), -1).astype(np.float32) / 255
    if min(pixels.shape) > 50:
        pixels = PCA(50, random_state=0).fit_transform(pixels)
    perplexity = min(_PERPLEXITY, max(2, (len(pixels) - 1) // 3))
    return TSNE(init="pca", random_state=0, perplexity=perplexity).fit_transform(pixels)


def _read(path: Path) -> dict[str, np.ndarray]:
    names = ("images", "expert", "weights", "root", "splits")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except Exception as error:  # zipfile, zlib and numpy have a kind of error for each way of being damaged
        raise RunError(f"{path} cannot be read ({error!r}): remove it, and the report goes without") from error


def _best(indices: Sequence[int], numbers: Sequence[Numbers]) -> list[int]:
    def score(index: int) -> float:
        value = numbers[index].validation_score
        return float("inf") if value is None else value

    return sorted(indices, key=score)[:MOST_RUNS]


def _colour(number: int, count: int):
    from matplotlib import colormaps

    if count <= 10:
        return colormaps["tab10"](number)
    return colormaps["turbo"](number / (count - 1))
