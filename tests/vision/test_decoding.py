"""A picture that is stored in hundreds of ways is decoded to what a viewer shows, or refused by name."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fairseq_alma.core.errors import SettingError
from tests.vision.picture_files import COLOUR, SIZE, Case, all_cases, encoded, rgb_profile, uncovered
from vision.datasets import load_dataset
from vision.datasets.decoding import as_shown, image_endings, image_values, opened

CASES = all_cases()


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():  # Pillow warns about damaged EXIF data
        warnings.simplefilter("ignore")
        yield


def write(case: Case, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    case.write(folder / case.name)
    return folder / case.name


def difference(found: np.ndarray, shown: Image.Image) -> int:
    """Return the largest difference between pixels [h, w, 3] and a picture."""
    return int(np.abs(found.astype(int) - np.asarray(shown.convert("RGB"), dtype=int)).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_is_decoded_to_what_a_viewer_shows_or_refused_by_name(tmp_path, case):
    path = write(case, tmp_path)
    assert path.suffix.lower() in image_endings()
    if isinstance(case.shown, str):
        with pytest.raises(SettingError) as error, opened(path, f"mine: {path}") as image:
            as_shown(image, f"mine: {path}")
        assert str(error.value).startswith(f"mine: {path} ")
        assert case.shown in str(error.value)
        return
    with opened(path, case.name) as image:
        found = as_shown(image, case.name)
    assert found.size == SIZE
    assert found.mode in ("L", "RGB")
    assert difference(np.asarray(found.convert("RGB")), case.shown) <= case.tolerance
    assert np.array_equal(as_shown(found, "again"), found)


def test_a_folder_with_all_these_files_is_read_whole(tmp_path):
    cases = [case for case in CASES if not isinstance(case.shown, str)]
    assert len(cases) > 250
    for case in cases:
        write(case, tmp_path / "mine/train/all")
    for name in ("train/other/0.png", "test/all/0.png", "test/other/0.png"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        COLOUR.save(tmp_path / "mine" / name)
    dataset = load_dataset(f"{tmp_path}/mine", tmp_path)
    assert dataset.image_shape == (3, SIZE[1], SIZE[0])
    assert len(dataset.training) == len(cases) + 1
    assert dataset.files is not None
    assert dataset.files.ignored == {"files after their first frame": 5}  # the further picture of an MPO is a preview
    images = dataset.training.images.view(-1, *dataset.image_shape).permute(0, 2, 3, 1).numpy()
    for case, image in zip(sorted(cases, key=lambda case: case.name), images, strict=False):
        assert difference(image, case.shown) <= case.tolerance, case.name


def test_a_picture_is_turned_and_converted_once(tmp_path):
    """What other libraries return has been converted to RGB, but still has the orientation and the profile."""
    image = Image.new("RGB", (3, 2), (10, 200, 30))
    image.info["icc_profile"] = rgb_profile()
    image.getexif()[0x112] = 6
    once = as_shown(image, "mine")
    assert once.size == (2, 3)
    assert once.getpixel((0, 0)) != (10, 200, 30)
    assert np.array_equal(as_shown(once, "mine"), once)


def test_transparency_is_laid_on_white_in_proportion():
    image = Image.new("RGBA", (1, 1), (0, 100, 200, 64))
    red, green, blue = as_shown(image, "mine").getpixel((0, 0))
    # 255 + (colour - 255) * 64 / 255, rounded
    assert (red, green, blue) == pytest.approx((191, 216, 241), abs=1)


@pytest.mark.parametrize("size", [(1, 40_000), (40_000, 1)])
def test_a_line_that_would_be_scaled_to_a_huge_image_is_refused(size):
    with pytest.raises(
        SettingError, match=f"mine has {size[0]} x {size[1]} pixels .*which image_size=64 would scale to"
    ):
        image_values(Image.new("L", size), "L", 64, "mine")


def test_the_ending_of_a_program_is_no_ending_of_an_image():
    assert {".jpg", ".jfif", ".gif", ".webp", ".jp2", ".mpo", ".tiff", ".pgm"} <= image_endings()
    assert not {".eps", ".ps", ".pdf", ".h5", ".mpg", ".wmf", ".txt", ""} & image_endings()


def test_damaged_bytes_never_end_in_another_error(tmp_path):
    """Flip bits at all places of small files: each is decoded or refused by name."""
    random = np.random.default_rng(0)
    uncovered(COLOUR).save(tmp_path / "a.png")
    files = {
        "a": (tmp_path / "a.png").read_bytes(),
        **{kind: encoded(kind) for kind in ("jpeg", "gif", "tiff", "bmp", "tga")},
    }
    num_refused = 0
    for kind, content in files.items():
        for place in random.choice(len(content), 30, replace=False):
            damaged = bytearray(content)
            damaged[place] ^= 1 << random.integers(8)
            (tmp_path / "mine").write_bytes(damaged)
            try:
                with opened(tmp_path / "mine", kind) as image:
                    as_shown(image, kind)
            except SettingError as error:
                num_refused += str(error).startswith(kind)
    assert num_refused > 20
