import re
import warnings

import numpy as np
import pytest

from fairseq_alma.core.catalogue import learners
from fairseq_alma.core.error_matrix import ErrorFile
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.report.cli import save
from fairseq_alma.report.figures import FIGURES, figures_or_errors
from fairseq_alma.report.figures.curves import (
    join_single_curves,
    on_tasks,
    over_the_stream,
    panels_of,
    running_averages,
)
from fairseq_alma.report.figures.maps import error_map, error_maps, expert_loads, load_map
from fairseq_alma.report.figures.radar import radar_shares
from fairseq_alma.report.figures.routing import gate_tree, routing_map
from fairseq_alma.report.figures.style import APPEARANCES, MATPLOTLIB_DASHES, PLOTLY_DASHES, appearance_of, dashes_of
from fairseq_alma.report.figures.tradeoffs import (
    against_compute,
    against_parameters,
    against_wait,
    replay_segments,
)
from fairseq_alma.report.numbers import all_numbers
from tests.fairseq_alma.report.ledgers import only_comparison, write_text, write_vision

SM, ENS = appearance_of("sm").colour, appearance_of("ens").colour


def compare(folder):
    comparison = only_comparison(folder)
    return comparison, all_numbers(comparison)


def lines_of(axes):
    """Return (colour, dashes, xs, ys) of every line with at least two points."""
    return [
        (line.get_color(), line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if len(line.get_xdata()) > 1
    ]


def visible(figure):
    return [axes for axes in figure.axes if axes.axison]


@pytest.fixture
def vision(tmp_path):
    """SM and Ens at waits 1 and 2, widths 4 and 8, two seeds of one of them, one with replay."""
    for seed, end in ((0, 0.2), (1, 0.4)):
        write_vision(tmp_path / f"a{seed}", [0.9, 0.5, end], seed=seed, flops=10**12, params=100)
    write_vision(tmp_path / "b", [0.9, 0.4, 0.25], width=8, flops=4 * 10**12, params=400)
    write_vision(tmp_path / "c", [0.9, 0.9, 0.2], wait=2, flops=10**12, params=100)
    write_vision(tmp_path / "d", [0.9, 0.4, 0.1], learner="ens", flops=5 * 10**12, params=500)
    write_vision(tmp_path / "e", [0.9, 0.5, 0.1], replay="all", flops=2 * 10**12, params=100)
    write_vision(tmp_path / "f", [0.9, 0.5], width=8, wait=2, mega_batches=2, learner="ens")
    return compare(tmp_path)


def test_error_over_the_stream_with_a_panel_a_size_and_bands_over_seeds(vision):
    figure = over_the_stream(*vision)
    panels = {axes.get_title(): axes for axes in visible(figure)}
    assert list(panels) == ["width 4", "replay, width 4", "width 8"]
    first = lines_of(panels["width 4"])
    assert (SM, "-", [0, 1, 2], pytest.approx([90, 50, 30])) in first  # the mean of two seeds, in percent
    assert (SM, "--", [0, 1, 2], pytest.approx([90, 90, 20])) in first
    assert (ENS, "-", [0, 1, 2], pytest.approx([90, 40, 10])) in first
    [band] = panels["width 4"].collections
    assert band.get_paths()[0].get_extents().ymin == pytest.approx(20)  # 30 - 10, at the end
    # An unfinished run is drawn up to its last arrival.
    assert (ENS, "--", [0, 1], pytest.approx([90, 50])) in lines_of(panels["width 8"])
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["SM", "Ens", "wait 1", "wait 2"]


def test_perplexity_is_drawn_from_the_first_stage_on(tmp_path):
    write_text(tmp_path / "a", [900.0, 900.0, 50.0, 40.0], wait=2)
    write_text(tmp_path / "b", [900.0, 60.0, 55.0, 45.0])
    [axes] = visible(over_the_stream(*compare(tmp_path)))
    assert [(xs, ys) for _, _, xs, ys in lines_of(axes)] == [([1, 2, 3], [60, 55, 45]), ([2, 3], [50, 40])]


def test_points_are_joined_over_sizes(vision):
    figure = against_compute(*vision)
    panels = {axes.get_title(): axes for axes in visible(figure)}
    assert list(panels) == ["", "replay"]
    cer = {"sm 4": 0.5 + 0.3, "sm 8": 0.65}
    assert (SM, "-", [2e12, 8e12], [cer["sm 4"], cer["sm 8"]]) in [
        (c, d, xs, pytest.approx(ys)) for c, d, xs, ys in lines_of(panels[""])
    ]  # fmt: skip
    [axes] = [axes for axes in visible(against_parameters(*vision)) if not axes.get_title()]
    assert [100, 400] in [xs for _, _, xs, _ in lines_of(axes)]


def test_cer_against_the_wait(vision):
    [axes] = visible(against_wait(*vision))
    assert axes.get_title() == "width 4"
    assert lines_of(axes)[0][2:] == ([1, 2], pytest.approx([0.8, 1.1]))


def test_a_wait_that_is_not_fixed_has_a_line_of_its_own_and_no_place_on_the_axis_of_waits(tmp_path):
    for wait in (1, 2, "geometric"):
        write_vision(tmp_path / str(wait), [0.9, 0.5, 0.4, 0.3], wait=wait)
    [axes] = visible(against_wait(*compare(tmp_path)))
    assert [xs for _, _, xs, _ in lines_of(axes)] == [[1, 2]]
    legend = over_the_stream(*compare(tmp_path)).legends[0]
    waits = [line for line in legend.get_lines() if line.get_label().startswith("wait")]
    assert [line.get_label() for line in waits] == ["wait 1", "wait 2", "wait geometric"]
    assert len({str(line._dash_pattern) for line in waits}) == 3


def test_replay_is_a_segment_from_without_to_with(vision):
    [axes] = visible(replay_segments(*vision))
    assert (SM, "-", [2e12, 4e12], pytest.approx([0.8, 0.6])) in lines_of(axes)


def test_running_averages_against_three_costs(tmp_path):
    write_text(
        tmp_path / "a", [900.0, 60.0, 40.0], learner="gmoe", row_experts=[2, 2, 4], params=[10, 10, 20], flops=10**12
    )
    flops, params, experts = visible(running_averages(*compare(tmp_path)))
    assert [lines_of(axes)[0][2:] for axes in (flops, params, experts)] == [
        ([1e12, 2e12], pytest.approx([60, 2400**0.5])), ([10, 20], pytest.approx([60, 2400**0.5])),
        ([2, 4], pytest.approx([60, 2400**0.5])),
    ]  # fmt: skip


def test_a_running_average_charges_the_untrained_arrivals(tmp_path):
    write_text(tmp_path / "a", [900.0, 900.0, 40.0, 10.0], wait=2)
    axes = visible(running_averages(*compare(tmp_path)))[0]
    assert lines_of(axes)[0][3] == pytest.approx([(900 * 40) ** 0.5, (900 * 40 * 10) ** (1 / 3)])
    assert "geometric mean" in axes.get_ylabel()


def test_curves_of_one_learner_and_wait_have_different_markers(tmp_path):
    for experts in (4, 8, 12):
        write_text(tmp_path / str(experts), [900.0, 60.0, 40.0], experts=experts)
    figure = running_averages(*compare(tmp_path))
    fills = [line.get_markerfacecolor() for line in figure.legends[0].get_lines()]
    assert len(set(fills)) == 3
    drawn = [part.get_facecolor()[0].tolist() for part in visible(figure)[0].collections]
    assert len({tuple(colour) for colour in drawn}) == 3


def test_a_curve_that_would_be_alone_joins_the_panel_of_another_size(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], width=8)
    write_vision(tmp_path / "b", [0.9, 0.4, 0.3], width=8, learner="ens")
    write_vision(tmp_path / "c", [0.9, 0.6, 0.5], width=4)
    write_vision(tmp_path / "d", [0.9, 0.6, 0.5], width=4, replay="all")
    write_vision(tmp_path / "e", [0.9, 0.6, 0.5], width=8, replay="all")
    panels = {axes.get_title(): axes for axes in visible(over_the_stream(*compare(tmp_path)))}
    assert list(panels) == ["replay", "width 8"]
    assert [text.get_text() for text in panels["width 8"].texts] == ["width 4"]
    assert [text.get_text() for text in panels["replay"].texts] == ["width 4", "width 8"]


def test_sizes_at_the_ends_of_curves_do_not_cover_each_other(tmp_path):
    for width in (1, 2, 3, 4):
        write_vision(tmp_path / str(width), [0.9, 0.5, 0.3 + width / 1e6], width=width)
    [axes] = visible(over_the_stream(*compare(tmp_path)))
    offsets = sorted(text.get_position()[1] for text in axes.texts)
    assert [text.get_text() for text in axes.texts] == [f"width {width}" for width in (1, 2, 3, 4)]
    assert np.diff(offsets).min() > 7
    fills = [line.get_markerfacecolor() for line in axes.lines if len(line.get_xdata()) > 1]
    assert len(set(fills)) == 4


def test_replay_segments_name_their_sizes(tmp_path):
    for width in (4, 8):
        for replay in (False, "all"):
            write_vision(tmp_path / f"{width}{replay}", [0.9, 0.5], width=width, replay=replay)
    [axes] = visible(replay_segments(*compare(tmp_path)))
    assert [text.get_text() for text in axes.texts] == ["width 4", "width 8"]


def test_replay_segments_name_their_replay_if_it_differs(tmp_path):
    for name, more in {
        "none": {"replay": False}, "all": {"replay": "all"}, "half": {"replay": 0.5},
    }.items():  # fmt: skip
        write_vision(tmp_path / name, [0.9, 0.5], **more)
    [axes] = visible(replay_segments(*compare(tmp_path)))
    assert sorted(text.get_text() for text in axes.texts) == ["replay", "replay 0.5"]


def test_logarithmic_axes_are_named_and_have_ticks_between_the_labels(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], flops=10**12)
    write_vision(tmp_path / "b", [0.9, 0.4], flops=10**13, learner="ens")
    figure = dict(figures_or_errors(*compare(tmp_path)))["against_compute"]
    [axes] = visible(figure)
    assert axes.get_xlabel() == "training FLOPs over the stream (log)"
    assert axes.get_ylabel() == "CER over 1 mega-batches"
    assert {3e12, 4e12, 6e12} <= set(axes.xaxis.get_minorticklocs().round(6))


def test_the_radar_shows_runs_of_one_recipe(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], epochs=10)
    write_vision(tmp_path / "b", [0.9, 0.4], epochs=10, learner="ens")
    write_vision(tmp_path / "c", [0.9, 0.1], epochs=100)  # better, but of another recipe
    figure = FIGURES["radar"](*compare(tmp_path))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SM, epochs 10", "Ens, epochs 10"]
    assert "all runs with epochs 10" in figure.get_supxlabel()


def test_the_radar_is_a_share_of_the_largest(vision):
    comparison, numbers = vision
    shares, is_log = radar_shares([result for result in numbers if result.quality])
    # Comp of 2, 2, 4, 8 and 10 TFLOPs differs by five times: a linear axis.
    assert not is_log[2]
    assert sorted(row[2] for row in shares) == pytest.approx([0.2, 0.2, 0.4, 0.8, 1.0])
    assert FIGURES["radar"](comparison, numbers) is not None


def test_an_axis_of_the_radar_over_more_than_ten_times_is_logarithmic(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], flops=1, width=4)
    write_vision(tmp_path / "b", [0.9, 0.5], flops=1000, width=8)
    shares, is_log = radar_shares(compare(tmp_path)[1])
    assert is_log == [False, False, True, False, False]
    # From a tenth of the smallest at 0 to the largest at 1: four decades, of which the smallest is one up.
    assert [row[2] for row in shares] == pytest.approx([0.25, 1.0])


def test_load_is_1_where_it_is_even(tmp_path):
    load = [None, [[0.5, 0.5]], [[0.25, 0.5, 0.25]]]
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], learner="gmoe", row_experts=[2, 2, 3], load=load)
    comparison, numbers = compare(tmp_path)
    times, table = load_map(comparison.groups[0].runs[0], 0)
    assert times == [1, 2]
    np.testing.assert_allclose(table, [[1, 0.75], [1, 1.5], [np.nan, 0.75]])
    assert expert_loads(comparison, numbers) is not None


def test_figures_with_nothing_to_show_are_left_out(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5])
    names = [name for name, _ in figures_or_errors(*compare(tmp_path))]
    assert names == ["over_the_stream", "against_compute", "against_parameters"]


def test_a_run_without_a_trained_arrival_has_no_figure(tmp_path):
    write_vision(tmp_path / "a", [0.9], mega_batches=3)
    assert list(figures_or_errors(*compare(tmp_path))) == []


def test_of_too_many_panels_the_best_by_validation_are_drawn(tmp_path):
    for width in range(1, 16):
        write_vision(tmp_path / str(width), [0.9, 0.5 + width / 100], width=width)
    panels, num_left_out = panels_of(*compare(tmp_path))
    assert list(panels) == [f"width {width}" for width in range(1, 13)]
    assert num_left_out == 3


@pytest.mark.parametrize(
    ("root", "splits", "num_experts", "tree"),
    [
        (0, [], 1, 0),
        (0, [0], 2, [0, 1]),
        (0, [0, 1, 0], 4, [[0, 3], [1, 2]]),
        (3, [], 3, [0, 1, 2]),
        (2, [1], 3, [0, [1, 2]]),
    ],
)
def test_the_tree_of_gates(root, splits, num_experts, tree):
    assert gate_tree(root, splits, num_experts) == tree


def test_a_tree_of_another_number_of_experts_is_refused():
    with pytest.raises(RunError, match="has 2 experts, but the mixture has 3"):
        gate_tree(0, [0], 3)


def write_routing(folder, stage, expert, root, splits, num_experts):
    path = folder / f"stages/stage_{stage:03d}/routing.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    images = np.clip(rng.normal(128 * np.array(expert)[:, None, None], 20, (len(expert), 6, 6)), 0, 255).astype(
        np.uint8
    )
    np.savez_compressed(
        path, images=images, label=np.array(expert), expert=np.array(expert), root=root,
        weights=np.eye(num_experts, dtype=np.float16)[expert], splits=np.array(splits, dtype=np.int64),
    )  # fmt: skip
    return path


def test_the_map_of_experts_has_a_panel_a_growth(tmp_path):
    folder = write_vision(tmp_path / "a", [0.9, 0.5, 0.4], learner="gmoe", row_experts=[1, 1, 2])
    write_routing(folder, 1, [0] * 40, 0, [], 1)
    write_routing(folder, 2, [0, 1] * 20, 0, [0], 2)
    comparison, numbers = compare(tmp_path)
    before, after = visible(routing_map(comparison.groups[0], "gMoE"))
    assert [axes.get_title() for axes in (before, after)] == [
        "stage 1: 1 expert, 1 in use", "stage 2: 2 experts, 2 in use",
    ]  # fmt: skip
    assert len(before.collections[0].get_offsets()) == 40
    assert [len(part.get_offsets()) for part in after.collections] == [20, 20]
    assert sorted(text.get_text() for text in after.texts) == ["0", "1"]
    # The gate is in the middle of its branches.
    gate = next(line for line in after.lines if len(line.get_xdata()) == 1)
    leaves = np.array([text.xy for text in after.texts])
    assert [gate.get_xdata()[0], gate.get_ydata()[0]] == pytest.approx(leaves.mean(axis=0))
    assert "experts_1" in dict(figures_or_errors(comparison, numbers))


def test_a_damaged_routing_file_is_named(tmp_path):
    folder = write_vision(tmp_path / "a", [0.9, 0.5], learner="gmoe", row_experts=[1, 1])
    path = write_routing(folder, 1, [0] * 40, 0, [], 1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match=re.escape(str(path))):
        routing_map(compare(tmp_path)[0].groups[0], "gMoE")


def test_a_damaged_routing_file_costs_only_its_own_map(tmp_path):
    for name, width in (("a", 4), ("b", 8)):
        folder = write_vision(tmp_path / name, [0.9, 0.5], learner="gmoe", row_experts=[1, 1], width=width)
        path = write_routing(folder, 1, [0] * 40, 0, [], 1)
        if name == "a":
            path.write_bytes(b"no archive")
    figures = dict(figures_or_errors(*compare(tmp_path)))
    assert isinstance(figures["experts_1"], RunError)
    assert not isinstance(figures["experts_2"], RunError)


def test_maps_of_different_and_of_too_few_examples(tmp_path):
    folder = write_vision(tmp_path / "a", [0.9, 0.5, 0.4], learner="gmoe", row_experts=[1, 1, 2])
    write_routing(folder, 1, [0] * 40, 0, [], 1)
    path = write_routing(folder, 2, [0, 1] * 15, 0, [0], 2)
    group = compare(tmp_path)[0].groups[0]
    assert visible(routing_map(group, ""))[0].collections[0].get_offsets().shape == (30, 2)
    path.unlink()
    write_routing(folder, 2, [0, 1], 0, [0], 2)
    with pytest.raises(RunError, match="routing of 2 examples only, too few to draw the routing map"):
        routing_map(group, "")


def test_if_growth_does_not_follow_from_the_wait_it_has_panels_of_its_own(tmp_path):
    for width in (4, 8):
        for grow_every in (1, 5):
            write_vision(
                tmp_path / f"{width}_{grow_every}", [0.9, 0.5], learner="gmoe", row_experts=[1, 1], width=width,
                grow_every=grow_every,
            )  # fmt: skip
    comparison, numbers = compare(tmp_path)
    panels = [axes.get_title() for axes in visible(against_compute(comparison, numbers))]
    assert panels == ["grow_every 1", "grow_every 5"]


def test_curves_that_differ_only_in_growth_are_named(tmp_path):
    write_text(tmp_path / "sm", [900.0, 60.0, 50.0])
    for layers in (0, 2):
        write_text(tmp_path / f"{layers}", [900.0, 60.0, 45.0], learner="gmoe", grow_experts=2, grow_layers=layers)
    comparison, numbers = compare(tmp_path)
    (curves,) = join_single_curves(comparison, panels_of(comparison, numbers)[0]).values()
    assert [(group.learner, size) for group, size in curves] == [
        ("sm", ""), ("gmoe", "grow_layers 0"), ("gmoe", "grow_layers 2"),
    ]  # fmt: skip


def test_dollars_long_texts_and_bytes_of_other_encodings_are_drawn(tmp_path):
    for number, knob in enumerate(("a_$b_$ $", "x" * 5000, "caf\udce9")):
        write_vision(tmp_path / str(number), [0.9, 0.5], knob=knob, lr=number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, figure in figures_or_errors(*compare(tmp_path)):
            save(figure, tmp_path / name)
    assert (tmp_path / "over_the_stream.png").stat().st_size > 10_000
    assert (tmp_path / "over_the_stream.pdf").read_bytes().startswith(b"%PDF")


def test_a_diverged_run_is_drawn_without_a_warning(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0, float("inf")])
    write_text(tmp_path / "b", [900.0, 50.0, 45.0], learner="ens", members=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, figure in figures_or_errors(*compare(tmp_path)):
            save(figure, tmp_path / name)
    assert (tmp_path / "over_the_stream.png").stat().st_size > 10_000
    assert (tmp_path / "over_the_stream.pdf").read_bytes().startswith(b"%PDF")


def test_a_curve_with_an_option_is_drawn_beside_those_without(tmp_path):
    options = {"average": "power:8", "schedule": "constant", "replay": "uniform"}
    write_text(tmp_path / "sm", [900.0, 50.0, 40.0], average=None, schedule="per_stage")
    write_text(tmp_path / "ens", [900.0, 45.0, 35.0], learner="ens", members=2, average=None, schedule="per_stage")
    write_text(tmp_path / "average", [900.0, 40.0, 20.0], **options)
    [axes] = visible(over_the_stream(*compare(tmp_path)))
    assert len(lines_of(axes)) == 3
    assert [text.get_text() for text in axes.texts] == ["average power:8"]


def test_the_same_runs_give_the_same_bytes(vision, tmp_path):
    for name in ("one", "two"):
        save(over_the_stream(*vision), tmp_path / name)
    for ending in ("png", "pdf"):
        assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")


def write_matrix(folder, rates, class_names=None):
    for stage, by_mega_batch in enumerate(rates):
        ErrorFile(folder).add(stage, by_mega_batch, [0.5, None], class_names)


def test_the_error_map_shows_the_mean_over_seeds_with_a_row_per_arrival(tmp_path):
    for seed in (0, 1):
        folder = write_vision(tmp_path / str(seed), [0.9, 0.9, 0.5, 0.4], wait=2, seed=seed)
        write_matrix(folder, [[1.0, 0.8, 0.6], [0.2 * seed, 0.4, 0.5], [0.5, 0.2, 0.0]], ["cat", "dog"])
    comparison, numbers = compare(tmp_path)
    [(name, draw)] = error_maps(comparison, numbers)
    assert name == "errors_1"
    by_mega_batch, by_class, _ = visible(draw())
    wanted = [[100, 80, 60], [100, 80, 60], [10, 40, 50], [50, 20, 0]]
    assert np.allclose(by_mega_batch.images[0].get_array(), wanted)
    assert by_mega_batch.images[0].get_extent() == [0.5, 3.5, 3.5, -0.5]
    classes = by_class.images[0].get_array()
    assert np.allclose(classes[:, 0], 50) and classes.mask[:, 1].all()  # the second class has no test images
    assert [text.get_text() for text in by_class.get_xticklabels()] == ["cat", "dog"]


def test_error_maps_are_drawn_for_the_best_runs_only_and_name_the_metrics(tmp_path):
    for width in range(1, 7):
        folder = write_vision(
            tmp_path / str(width), [0.9, 0.5, width / 10], width=width, written={"forgetting": width / 100}
        )
        write_matrix(folder, [[0.9, 0.9], [0.5, 0.6], [0.4, 0.3]])
    comparison, numbers = compare(tmp_path)
    titles = [draw().get_suptitle() for _, draw in error_maps(comparison, numbers)]
    assert titles == [f"SM, width {width}\nforgetting {width}.00 %" for width in (1, 2, 3, 4)]


def test_a_damaged_error_matrix_costs_only_its_own_map(tmp_path):
    folder = write_vision(tmp_path / "a", [0.9, 0.5])
    (folder / "errors.jsonl").write_text("{\n")
    comparison, numbers = compare(tmp_path)
    found = dict(figures_or_errors(comparison, numbers))
    assert isinstance(found["errors_1"], RunError) and not isinstance(found["over_the_stream"], RunError)
    with pytest.raises(RunError, match=r"errors\.jsonl, line 1 is damaged"):
        error_map(comparison.groups[0], "SM")


def test_the_table_of_appearances_has_every_learner_of_the_catalogue_and_no_other():
    assert set(APPEARANCES) == {entry.name for entry in learners()}


def test_no_two_learners_share_a_colour_or_a_symbol():
    for name in ("colour", "marker", "symbol"):
        assert len({getattr(appearance, name) for appearance in APPEARANCES.values()}) == len(APPEARANCES)


def test_a_learner_of_a_plugin_always_looks_the_same_and_like_none_of_ours():
    assert appearance_of("my_own") == appearance_of("my_own")
    assert appearance_of("my_own").colour not in {appearance.colour for appearance in APPEARANCES.values()}


def test_six_waits_have_different_dashes():
    waits = [1, 2, 5, 10, 50, 100]
    for styles in (MATPLOTLIB_DASHES, PLOTLY_DASHES):
        assert len({str(dashes_of(wait, waits, styles)) for wait in waits}) == 6


def task_line(stage, digest, value, task="arc_easy"):
    return {
        "stage": stage, "checkpoints": [digest], "task": task, "metrics": {"acc": value, "acc_norm": 0.9},
        "stderr": {"acc": 0.1}, "num_examples": 10, "num_fewshot": 0, "lm_eval": "0.4.13",
    }  # fmt: skip


def test_scores_on_tasks_are_drawn_beside_the_perplexity(tmp_path):
    write_text(tmp_path / "none" / "a", [900.0, 50.0])
    assert on_tasks(*compare(tmp_path / "none")) is None
    for seed in (0, 1):
        run = write_text(tmp_path / f"some/a{seed}", [900.0, 50.0, 40.0, 30.0], seed=seed)
        (run / "predictors").mkdir()
        (run / "predictors/stage_002.json").write_text('{"checkpoints": [{"path": "x.pt", "sha256": "new"}]}')
        lines = [task_line(1, "a", 0.5 + 0.1 * seed), task_line(3, "a", 0.1), task_line(3, "a", 0.7 + 0.1 * seed)]
        lines += [task_line(2, "old", 0.2), task_line(1, "a", 0.3, "boolq")]
        JsonLines(run / "task_scores.jsonl").append(*lines)
    perplexity, arc, boolq = panels = visible(on_tasks(*compare(tmp_path / "some")))
    assert [axes.get_title() for axes in panels] == ["test perplexity", "arc_easy: acc", "boolq: acc"]
    marked = {axes: [line for line in axes.lines if line.get_marker() == "o"] for axes in panels}
    curves = {axes: [(list(one.get_xdata()), list(one.get_ydata())) for one in marked[axes]] for axes in panels}
    assert curves[perplexity] == [([1, 2, 3], [50.0, 40.0, 30.0])]
    # Stage 2 was trained again after its score was measured; the last score of a stage counts.
    [(times, values)] = curves[arc]
    assert (times, values) == ([1, 3], pytest.approx([0.55, 0.75]))
    assert curves[boolq] == [([1], [pytest.approx(0.3)])]
