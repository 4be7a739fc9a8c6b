"""What is read from a folder of images: which files, in which order, and what is refused or reported."""

import multiprocessing
import os
import shutil
import socket
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import read_json
from tests.vision.pictures import write_classes, write_image, write_parts
from tests.vision.test_folders import refusal, values
from tests.vision.tiny_runs import small_run
from vision.dataset_names import mega_batch_folders, natural_key
from vision.datasets import load_dataset
from vision.stream import partition


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder of images: train/a has the values 0, 1, train/b has 2, 3, and test/ has 100, 101."""
    return write_parts(tmp_path / "mine", {"a": 2, "b": 2}, {"a": 1, "b": 1})


def link_out(root: Path, name: str, is_folder: bool = False) -> None:
    """Make a link at `name` to an image of the value 77, or to a folder that contains it, outside the dataset."""
    write_image(root.parent / "elsewhere/deep/77.png", 77)
    (root / name).symlink_to(root.parent / ("elsewhere" if is_folder else "elsewhere/deep/77.png"))


def pipe_of(root: Path, name: str) -> None:
    os.mkfifo(root / name)


def socket_of(root: Path, name: str) -> None:
    here = Path.cwd()
    os.chdir((root / name).parent)  # the path of a socket has at most 107 characters
    socket.socket(socket.AF_UNIX).bind(Path(name).name)
    os.chdir(here)


READ: dict[str, tuple[Callable[[Path], object], list[int], dict[str, int]]] = {
    "link to a file": (lambda root: link_out(root, "train/a/x.png"), [0, 1, 77, 2, 3], {}),
    "link to a folder": (lambda root: link_out(root, "train/a/x", True), [0, 1, 77, 2, 3], {}),
    "class that is a link": (
        lambda root: (shutil.move(root / "train/a", root.parent), (root / "train/a").symlink_to(root.parent / "a")),
        [0, 1, 2, 3],
        {},
    ),
    "subfolders": (lambda root: write_image(root / "train/a/x/y/0.png", 9), [0, 1, 9, 2, 3], {}),
    "folder named as an image": (lambda root: write_image(root / "train/a/x.png/0.png", 9), [0, 1, 9, 2, 3], {}),
    "endings in any case": (lambda root: write_image(root / "train/a/X.PNG", 9), [0, 1, 9, 2, 3], {}),
    "other formats": (
        lambda root: [write_image(root / f"train/b/{n}.{e}", 9) for n, e in enumerate(("gif", "jp2", "tga", "jfif"))],
        [0, 1, 9, 2, 3, 9, 9, 9],
        {},
    ),
    "other endings": (
        lambda root: [(root / "train/a" / name).touch() for name in ("a.heic", "b.HEIC", "c.txt", "README")],
        [0, 1, 2, 3],
        {".heic": 2, ".txt": 1, "without an ending": 1},
    ),
    "other files of the test set": (lambda root: (root / "test/a/Thumbs.db").touch(), [0, 1, 2, 3], {".db": 1}),
    "hidden file": (lambda root: write_image(root / "train/a/._x.png", 9), [0, 1, 2, 3], {"hidden": 1}),
    "hidden folder": (
        lambda root: write_image(root / "train/a/.ipynb_checkpoints/x.png", 9), [0, 1, 2, 3], {"hidden": 1},
    ),
    "hidden class": (lambda root: write_image(root / "train/.ipynb_checkpoints/x.png", 9), [0, 1, 2, 3], {}),
    "hidden dangling link": (lambda root: (root / "train/a/.x").symlink_to("nothing"), [0, 1, 2, 3], {"hidden": 1}),
    "images beside class folders": (
        lambda root: write_image(root / "train/x.png", 9), [0, 1, 2, 3], {".png outside class folders": 1},
    ),
    "two parts for tests": (
        lambda root: shutil.copytree(root / "test", root / "val"), [0, 1, 2, 3], {"folder named val": 1},
    ),
    "pipe that is no image": (lambda root: pipe_of(root, "train/a/x.txt"), [0, 1, 2, 3], {".txt": 1}),
    "accents in two forms": (
        lambda root: [
            (root / part / "b").rename(root / part / unicodedata.normalize(form, "bé"))
            for part, form in (("train", "NFC"), ("test", "NFD"))
        ],
        [0, 1, 2, 3],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_is_read_and_what_is_ignored(root, name):
    make, expected, ignored = READ[name]
    make(root)
    dataset = load_dataset(str(root), root.parent)
    assert values(dataset.training) == pytest.approx(expected, abs=1)  # JPEG may change a value by 1
    assert dataset.files is not None
    assert dataset.files.ignored == ignored


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "dangling link": (
        lambda root: (root / "train/a/x.png").symlink_to("gone.png"),
        "train/a/x.png is a link to gone.png, which does not exist",
    ),
    "dangling folder": (lambda root: (root / "train/a/x").symlink_to("gone"), "a/x is a link to gone, which does"),
    "dangling class": (lambda root: (root / "train/c").symlink_to("gone"), "train/c is a link to gone, which does not"),
    "dangling part": (lambda root: (root / "val").symlink_to("gone"), "val is a link to gone, which does not exist"),
    "link to itself": (lambda root: (root / "train/a/x.png").symlink_to("x.png"), "is a link to x.png, which does not"),
    "loop": (lambda root: (root / "train/a/x").symlink_to(".."), "train/a/x/a is a link to a folder that contains it"),
    "pipe": (lambda root: pipe_of(root, "train/a/x.png"), "train/a/x.png is a pipe, a socket or a device, but no file"),
    "link to a pipe": (
        lambda root: (pipe_of(root, "pipe"), (root / "train/a/x.png").symlink_to("../../pipe")),
        "train/a/x.png is a pipe, a socket or a device, but no file",
    ),
    "device": (lambda root: (root / "train/a/x.png").symlink_to("/dev/zero"), "x.png is a pipe, a socket or a device"),
    "socket": (lambda root: socket_of(root, "train/a/x.png"), "x.png is a pipe, a socket or a device, but no file"),
    "only other formats": (
        lambda root: (root / "train/b/00.png").rename(root / "train/b/00.heic") and (root / "train/b/01.png").unlink(),
        "the class folder {root}/train/b contains no image (found: 1 .heic): add images",
    ),
    "parts with capital letters": (
        lambda root: [(root / part).rename(root / part.title()) for part in ("train", "test")],
        "contains the folders Test, Train, which are no classes. The folder must contain train/CLASS/IMAGE and test/",
    ),
    "parts with other names": (
        lambda root: (root / "train").rename(root / "training"), "contains the folders test, training, which are no",
    ),
}  # fmt: skip


def load(root: Path, out: Path) -> None:
    out.write_text(refusal(root, root.parent))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_with_its_name(root, name):
    make, message = REFUSED[name]
    make(root)
    # In a process of its own: before, it read a pipe or a device for ever.
    process = multiprocessing.get_context("fork").Process(target=load, args=(root, root.parent / "message"))
    process.start()
    process.join(60)
    process.kill()
    assert message.format(root=root) in (root.parent / "message").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
@pytest.mark.parametrize("name", ["train/a", "train/a/x", "train/a/00.png", "train"])
def test_what_cannot_be_read_is_named(root, name):
    (root / "train/a/x").mkdir()
    mode = (root / name).stat().st_mode
    (root / name).chmod(0)
    try:
        message = refusal(root, root.parent)
    finally:
        (root / name).chmod(mode)
    assert f"{root / name} cannot be read" in message
    assert "Permission denied" in message


# ---- Order.


def test_names_are_in_natural_order():
    names = ["01", "-1", "0", "1", "-10", "2", "10", "10b", "11", "a", "week_2", "week_10", "week_10_1", "week_10_10"]
    assert sorted(names, key=natural_key) == ["-10", "-1", "0", "01", "1", *names[5:]]


def test_twelve_folders_arrive_in_the_order_of_their_numbers(tmp_path):
    for number in range(1, 13):
        write_classes(tmp_path / f"mine/train/{number}", {"a": 2, "b": 2}, first=10 * number)
    write_classes(tmp_path / "mine/test", {"a": 1, "b": 1})
    dataset = load_dataset(f"{tmp_path}/mine", tmp_path, order="folders")
    arrivals = partition(dataset, 12, 0.1, 0, "folders")
    assert [int(one.training.images.min()) // 10 for one in arrivals] == list(range(1, 13))
    assert dataset.files is not None
    assert dataset.files.mega_batches == [str(number) for number in range(1, 13)]


def test_twelve_classes_are_in_the_order_of_their_numbers(tmp_path):
    for prefix in ("", "class_"):
        names = [f"{prefix}{number}" for number in range(1, 13)]
        root = write_parts(tmp_path / f"mine{prefix}", dict.fromkeys(names, 1), dict.fromkeys(names, 1))
        dataset = load_dataset(str(root), tmp_path)
        assert dataset.class_names == names
        assert values(dataset.training) == dataset.training.labels.tolist() == list(range(12))


@pytest.mark.parametrize("names", [("11-2026", "12-2026", "01-2027"), ("March", "April"), ("Mar-26", "Apr-26")])
def test_months_that_would_arrive_in_another_order_are_refused_as_mega_batches(tmp_path, names):
    for name in names:
        write_classes(tmp_path / "mine/train" / name, {"a": 2, "b": 2})
    with pytest.raises(SettingError, match=r"does not begin with the year, or its month is a word"):
        mega_batch_folders(tmp_path / "mine")


def test_decimals_that_may_be_dates_are_refused_as_mega_batches(tmp_path):
    for name in ("2019.2", "2019.12"):
        write_classes(tmp_path / "mine/train" / name, {"a": 2, "b": 2})
    with pytest.raises(SettingError, match=r"the folders 2019.2, 2019.12 in .* have one order as decimal numbers"):
        mega_batch_folders(tmp_path / "mine")
    (tmp_path / "mine/train/2019.2").rename(tmp_path / "mine/train/2019.02")
    assert [one.name for one in mega_batch_folders(tmp_path / "mine")] == ["2019.02", "2019.12"]


FILES = ["train/a/00.png", "train/a/01.png", "train/b/00.png", "train/b/01.png"]


def column(root: Path, *texts: str, head: str = "file,day") -> str:
    lines = [head, *(f"{file},{text}" for file, text in zip(FILES, texts, strict=True))]
    (root / "columns.csv").write_text("\n".join(lines), encoding="utf-8")
    return "column:day"


@pytest.mark.parametrize(
    ("texts", "order"),
    [
        (("10", "9", "-1", "2.5"), [2, 3, 1, 0]),
        (("20231123101500124", "20231123101500123", "20231123101500126", "20231123101500125"), [1, 0, 3, 2]),
        (("2020-10-01", "2020-9-30", "2019-12-31", "2020-1-5"), [2, 3, 1, 0]),
        (("week 10", "week 9", "week 1", "week 11"), [2, 1, 0, 3]),
        (("2020_10", "2020_9", "2019_12", "2020_1"), [2, 3, 1, 0]),
        ((" 10", "9 ", "1", "11"), [2, 1, 0, 3]),
        (("Mayor 2020", "Market 2019", "Decision 2021", "December"), [3, 2, 1, 0]),
    ],
)
def test_a_column_sorts_numbers_and_texts(root, texts, order):
    how = column(root, *texts)
    arrivals = partition(load_dataset(str(root), root.parent, order=how), 2, 0.1, 0, how)
    images = [[int(part.images[0, 0]) for part in (one.training, one.validation)] for one in arrivals]
    assert [sorted(one) for one in images] == [sorted(order[:2]), sorted(order[2:])]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ("10", "", "8", "7"),
            "columns.csv has no value for 1 images, the first of which is train/a/01.png: fill them in",
        ),
        (("10", "9", "nan", "7"), "has no value for 1 images, the first of which is train/b/00.png"),
        (("10", "9", "8", "n/a"), "has 3 numbers and 1 texts, the first of which is 'n/a' for train/b/01.png"),
        (("31/12/2019", "01/01/2020", "02/01/2020", "03/01/2020"), "the date 31/12/2019 does not begin with the year"),
        (("12/2019", "01/2020", "02/2020", "03/2020"), "the date 12/2019 does not begin with the year"),
        (("5-Mar-2020", "6-Apr-2020", "7-May-2020", "8-Jun-2020"), "or its month is a word"),
        (("2020 March", "2020 April", "2020 May", "2020 June"), "the date 2020 March does not begin"),
        (("March 5 2020", "April 6 2020", "x", "y"), "the date March 5 2020 does not begin"),
        (("5-Mar-20", "10-Jan-20", "7-Feb-21", "8-Feb-21"), "the date 5-Mar-20 does not begin"),
        (("Mar-20", "Jan-21", "Feb-21", "Apr-21"), "the date Mar-20 does not begin"),
        (("March", "April", "May", "June"), "the date March does not begin"),
        (("03/20", "01/21", "02/21", "03/21"), "the date 03/20 does not begin"),
        (("11.2026", "12.2026", "01.2027", "02.2027"), "the date 11.2026 does not begin"),
        (("2026.9", "2026.10", "2026.11", "2026.12"), "the date 2026.9 does not begin"),
    ],
)
def test_a_column_that_cannot_be_sorted_is_refused(root, texts, message):
    how = column(root, *texts)
    with pytest.raises(SettingError) as error:
        partition(load_dataset(str(root), root.parent, order=how), 2, 0.1, 0, how)
    assert message in str(error.value)
    load_dataset(str(root), root.parent)  # a column that is not used may have gaps


@pytest.mark.parametrize("head", ["\ufefffile,day", "day,file"])
def test_tables_of_other_programs_are_read(root, head):
    lines = [f"{file.replace('/', chr(92))},{number}" for number, file in enumerate(FILES)]
    if head == "day,file":
        lines = [f"{number},./{file}" for number, file in enumerate(FILES)]
    (root / "columns.csv").write_text("\r\n".join([head, *lines]), encoding="utf-8")
    assert load_dataset(str(root), root.parent).columns["day"].tolist() == [0, 1, 2, 3]


def test_two_values_for_a_file_are_refused(root):
    column(root, "1", "2", "3", "4")
    with (root / "columns.csv").open("a") as file:
        file.write("\n./train/a/00.png,9")
    assert "has two lines for train/a/00.png with different values" in refusal(root, root.parent)


# ---- The file with the decoded images.


def test_other_images_with_the_same_names_times_and_sizes_are_decoded_again(tmp_path):
    """As from two archives whose files all have the same time."""
    for folder, first in (("one", 3), ("two", 50)):
        for part in ("train", "test"):
            write_classes(tmp_path / folder / part, {"a": 1, "b": 1}, first=first)
        for path in (tmp_path / folder).rglob("*.png"):
            os.utime(path, (0, 0))
    sizes = [[path.stat().st_size for path in sorted((tmp_path / one).rglob("*.png"))] for one in ("one", "two")]
    assert sizes[0] == sizes[1]
    data = tmp_path / "data"
    assert values(load_dataset(f"{tmp_path}/one", data).training) == [3, 4]
    assert values(load_dataset(f"{tmp_path}/two", data).training) == [50, 51]
    # The second archive is unpacked over the first.
    shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
    assert values(load_dataset(f"{tmp_path}/one", data).training) == [50, 51]


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", None, bytes])
@pytest.mark.parametrize("name", ["images.npy", "entry.json"])
def test_a_damaged_file_of_decoded_images_is_written_again(root, damage, name):
    before = values(load_dataset(str(root), root.parent).training)
    (cached,) = (root.parent / "image_cache").rglob(name)
    if damage is None:
        cached.unlink()
    elif damage is bytes:  # zeros, but as many as before
        cached.write_bytes(bytes(cached.stat().st_size))
    else:
        cached.write_bytes(damage)
    assert values(load_dataset(str(root), root.parent).training) == before


def test_files_with_several_frames_are_counted_each_time(root):
    Image.new("L", (4, 4), 7).save(root / "train/a/x.gif", save_all=True, append_images=[Image.new("L", (4, 4), 9)])
    for _ in range(2):
        dataset = load_dataset(str(root), root.parent)
        assert values(dataset.training) == [0, 1, 7, 2, 3]
        assert dataset.files is not None
        assert dataset.files.ignored == {"files after their first frame": 1}


def test_images_that_are_upright_in_two_ways_are_refused_without_image_size(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1}, {"a": 1, "b": 1}, size=(6, 4))
    exif = Image.Exif()
    exif[0x112] = 6
    Image.new("L", (6, 4)).save(root / "train/b/00.png", exif=exif)
    message = refusal(root, tmp_path)
    assert f"a/00.png has 6 x 4 pixels, but {root}/train/b/00.png has 4 x 6 (width x height)" in message
    Image.new("L", (4, 6)).save(root / "train/b/00.png", exif=exif)
    assert load_dataset(str(root), tmp_path).image_shape == (1, 4, 6)


# ---- What a run says about it.


def test_one_line_says_what_was_read_and_inputs_json_keeps_it(tmp_path, capsys):
    for number in (2, 10):
        write_classes(tmp_path / f"mine/train/{number}", {"a": 3, "b": 2}, first=10 * number)
        (tmp_path / f"mine/train/{number}/a/photo.heic").touch()
    write_classes(tmp_path / "mine/test", {"a": 1, "b": 1})
    how = {"dataset": f"{tmp_path}/mine", "data_root": str(tmp_path), "backbone": "mlp", "epochs": 1, "mega_batches": 2}
    small_run(tmp_path / "run", **how, order="folders")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dataset=")]
    assert line == (
        f"dataset={tmp_path}/mine: 10 training images (a 6, b 4) and 2 test images (a 1, b 1), 4 x 4 pixels, 1 "
        f"channel(s); 2 mega-batches of 5, in the order of the folders 2, 10; ignored: 2 .heic"
    )
    assert read_json(tmp_path / "run/inputs.json")["read"] == {
        "training": {"a": 6, "b": 4}, "test": {"a": 1, "b": 1}, "mega_batches": [5, 5], "order": "folders",
        "folders": ["2", "10"], "ignored": {".heic": 2},
    }  # fmt: skip
    (tmp_path / "mine/train/2/a/photo.heic").unlink()
    small_run(tmp_path / "run", **how, order="folders")
    assert read_json(tmp_path / "run/inputs.json")["read"]["ignored"] == {".heic": 1}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, "; 4 mega-batches of 359 to 360, in random order"),
        ({"order": "classes"}, "class after class (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)"),
        ({"seeds": 2}, "dataset=digits: 1438 training images (10 classes of 136 to 154) and 359 test images"),
    ],
)
def test_the_line_is_short_for_a_known_dataset(tmp_path, capsys, how, expected):
    small_run(tmp_path / "run", epochs=1, **how)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dataset=")]
    assert expected in line


def test_names_that_would_control_a_terminal_are_escaped(tmp_path, capsys):
    name = "\x1b[31mred\n\udce9"
    root = write_parts(tmp_path / "mine", {name: 3, "é": 3}, {name: 1, "é": 1})
    how = {"dataset": str(root), "data_root": str(tmp_path), "backbone": "mlp", "mega_batches": 2, "epochs": 1}
    small_run(tmp_path / "run", **how)
    assert "(\\x1b[31mred\\n\\udce9 3, é 3)" in capsys.readouterr().err
