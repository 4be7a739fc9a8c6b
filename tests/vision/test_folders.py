"""Folders of images: what is read from them, how it is cached, and which folders are refused."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vision
from fairseq_alma.core.errors import SettingError
from tests.vision.pictures import write_classes, write_image, write_parts
from tests.vision.tiny_runs import small_run
from vision.datasets import image_cache, load_dataset


def refusal(root, data_root, **how) -> str:
    with pytest.raises(SettingError) as error:
        load_dataset(str(root), data_root, **how)
    return str(error.value)


def values(examples) -> list[int]:
    """Return the first pixel of each image."""
    return examples.images[:, 0].tolist()


def test_train_and_test_folders_are_read_in_the_order_of_the_names(tmp_path):
    root = write_parts(tmp_path / "mine", {"dog": 2, "cat": 3}, {"cat": 1, "dog": 1})
    (root / "train/cat/notes.txt").write_text("no image")
    (root / "train/.hidden").mkdir()
    dataset = load_dataset(str(root), tmp_path)
    assert (dataset.name, dataset.image_shape, dataset.num_classes) == (str(root), (1, 4, 4), 2)
    assert values(dataset.training) == [2, 3, 4, 0, 1]  # cat comes before dog
    assert dataset.training.labels.tolist() == [0, 0, 0, 1, 1]
    assert (values(dataset.test), dataset.test.labels.tolist()) == ([100, 101], [0, 1])
    assert dataset.training.images.dtype == torch.uint8
    # The mean of 0..4 over 255, and its deviation, the square root of 2 over 255.
    assert dataset.pixels.largest == 255
    assert dataset.pixels.mean == pytest.approx((2 / 255,))
    assert dataset.pixels.deviation == pytest.approx((2**0.5 / 255,))


def test_val_is_the_test_set_if_there_is_no_test(tmp_path):
    write_classes(tmp_path / "mine/train", {"a": 2, "b": 2})
    write_classes(tmp_path / "mine/val", {"a": 1, "b": 1}, first=9)
    assert values(load_dataset(f"{tmp_path}/mine", tmp_path).test) == [9, 10]


def test_of_class_folders_alone_a_fixed_fifth_is_the_test_set(tmp_path):
    write_classes(tmp_path / "mine", {"a": 10, "b": 10})
    dataset = load_dataset(f"{tmp_path}/mine", tmp_path)
    order = np.random.RandomState(0).permutation(20).tolist()
    assert values(dataset.test) == order[:4]
    assert values(dataset.training) == order[4:]
    assert dataset.training.labels.tolist() == [int(value >= 10) for value in order[4:]]


def test_colour_images_are_stored_channel_by_channel(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1}, {"a": 1, "b": 1}, size=(3, 2), mode="RGB")
    image = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)  # row, column, channel
    Image.fromarray(image).save(root / "train/a/00.png")
    write_image(root / "train/b/00.png", 7, size=(3, 2))  # a grey image among colour images
    dataset = load_dataset(str(root), tmp_path)
    assert dataset.image_shape == (3, 2, 3)
    assert dataset.training.images[0].tolist() == image.transpose(2, 0, 1).flatten().tolist()
    assert dataset.training.images[1].tolist() == [7] * 18


def test_image_size_scales_the_shorter_side_and_cuts_out_the_middle(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1}, {"a": 1, "b": 1}, size=(8, 4))
    wide = np.repeat(np.array([10, 20, 30, 40], np.uint8), 2)[None].repeat(4, 0)  # 4 x 8, in pairs of columns
    Image.fromarray(wide).save(root / "train/a/00.png")
    write_image(root / "train/b/00.png", 9, size=(5, 10))
    dataset = load_dataset(str(root), tmp_path, image_size=4)
    assert dataset.image_shape == (1, 4, 4)
    # The height is 4 already, so nothing is scaled: the columns 2 to 5 remain.
    assert dataset.training.images[0].tolist() == [20, 20, 30, 30] * 4
    assert dataset.training.images[1].tolist() == [9] * 16
    half = load_dataset(str(root), tmp_path, image_size=2).training.images[0].view(2, 2)
    # 2 x 4 pixels after scaling, near 10, 20, 30, 40: the two in the middle remain. The antialiasing filter mixes
    # neighbours, so they are not exactly 20 and 30.
    assert (half.int() - torch.tensor([[20, 30]] * 2)).abs().max() <= 2


def test_images_are_decoded_once_and_again_only_if_a_file_changes(tmp_path, monkeypatch):
    root = write_parts(tmp_path / "mine", {"a": 2, "b": 1}, {"a": 1, "b": 1})
    decoded = []
    values_of = image_cache.image_values
    monkeypatch.setattr(image_cache, "image_values", lambda *args: decoded.append(1) or values_of(*args))
    first = load_dataset(str(root), tmp_path / "data")
    assert len(decoded) == 5
    again = load_dataset(str(root), tmp_path / "data")
    assert len(decoded) == 5
    assert torch.equal(first.training.images, again.training.images)
    (cached,) = (tmp_path / "data/image_cache").rglob("*.npy")
    assert np.load(cached).shape == (5, 1, 4, 4)
    write_image(root / "train/a/00.png", 77)
    os.utime(root / "train/a/00.png", ns=(1, 1))  # even if the size is the same
    assert values(load_dataset(str(root), tmp_path / "data").training) == [77, 1, 2]
    assert len(decoded) == 10
    load_dataset(str(root), tmp_path / "data", image_size=3)
    assert len(decoded) == 15


def test_what_was_decoded_of_an_earlier_week_is_removed_when_it_is_not_used_any_more(tmp_path, monkeypatch):
    root = write_parts(tmp_path / "mine", {"a": 2, "b": 1}, {"a": 1, "b": 1})
    other = write_parts(tmp_path / "other", {"a": 1, "b": 1}, {"a": 1, "b": 1})
    load_dataset(str(other), tmp_path)
    for week in range(3):
        load_dataset(str(root), tmp_path)
        write_image(root / f"train/a/week_{week}.png", week)
    cache = tmp_path / "image_cache"
    assert len(list(cache.iterdir())) == 4
    (newest,) = (one for one in cache.iterdir() if np.load(one / "images.npy").shape[0] == 7)
    for one in cache.iterdir():
        if one != newest:
            os.utime(one, (1, 1))
    load_dataset(str(root), tmp_path)
    sizes = sorted(np.load(one / "images.npy").shape[0] for one in cache.iterdir())
    assert sizes == [4, 7, 8]  # of the other folder, of the week before, and of this week


def test_a_run_inside_the_folder_of_its_images_is_refused(tmp_path):
    """Its folder would be a class, or a mega-batch."""
    parts = write_parts(tmp_path / "parts", {"a": 2, "b": 2}, {"a": 1, "b": 1})
    classes = tmp_path / "classes"
    write_classes(classes, {"a": 4, "b": 4})
    for root, out in ((parts, parts / "train/run"), (classes, classes), (classes, classes / "runs/one")):
        with pytest.raises(SettingError, match="is in the folder of images"):
            vision.run(dataset=str(root), data_root=str(tmp_path), out=str(out), backbone="mlp", mega_batches=1)


def test_the_images_are_a_file_that_is_never_changed(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1}, {"a": 1, "b": 1})
    dataset = load_dataset(str(root), tmp_path)
    (cached,) = (tmp_path / "image_cache").rglob("*.npy")
    assert str(cached) in Path("/proc/self/maps").read_text()
    dataset.training.images[0, 0] = 99
    assert values(load_dataset(str(root), tmp_path).training) == [0, 1]


def test_two_processes_that_start_at_once_and_a_killed_one_leave_one_whole_file(tmp_path, monkeypatch):
    root = write_parts(tmp_path / "mine", {"a": 40, "b": 40}, {"a": 1, "b": 1}, size=(64, 64))
    folder, values_of, seen = tmp_path / "image_cache", image_cache.image_values, []

    def killed_in_the_middle(*arguments):
        seen.append(1)
        if len(seen) == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return values_of(*arguments)

    def slow(*arguments):
        time.sleep(0.01)
        return values_of(*arguments)

    def start():
        process = multiprocessing.get_context("fork").Process(target=load_dataset, args=(str(root), tmp_path))
        process.start()
        return process

    monkeypatch.setattr(image_cache, "image_values", killed_in_the_middle)
    (killed := start()).join()
    assert killed.exitcode == -signal.SIGKILL
    assert [path.parent.suffix for path in folder.rglob("images.npy")] == [".part"]
    monkeypatch.setattr(image_cache, "image_values", slow)
    both = [start(), start()]
    deadline = time.monotonic() + 30
    while len(list(folder.glob("*.part"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(list(folder.glob("*.part"))) == 3  # both write at the same time
    for process in both:
        process.join()
        assert process.exitcode == 0
    (left,) = folder.glob("*.part")
    (whole,) = (path for path in folder.iterdir() if path != left)
    monkeypatch.undo()
    assert values(load_dataset(str(root), tmp_path).training) == list(range(80))
    # What nobody has written for a day is removed when images are decoded the next time.
    for path in (left, *left.iterdir()):
        os.utime(path, (1, 1))
    (whole / "images.npy").unlink()
    load_dataset(str(root), tmp_path)
    assert [path.name for path in folder.iterdir()] == [whole.name]


def test_a_folder_is_trained_on_with_one_command_and_continued(tmp_path):
    root = write_parts(tmp_path / "mine", {"dark": 30, "light": 30}, {"dark": 5, "light": 5})
    how = {"dataset": str(root), "data_root": str(tmp_path), "backbone": "mlp", "mega_batches": 3, "epochs": 20}
    (rows,) = small_run(tmp_path / "run", **how)
    assert len(rows) == 4
    assert small_run(tmp_path / "run", **how) == [rows]


# ---- Refused folders.


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    assert f"the folder {tmp_path}/mine does not exist" in refusal(tmp_path / "mine", tmp_path)


def test_a_folder_without_class_folders_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    message = refusal(tmp_path / "mine", tmp_path)
    assert f"{tmp_path}/mine contains no class folders. The folder must contain train/CLASS/IMAGE" in message


def test_a_folder_with_one_class_is_refused(tmp_path):
    write_classes(tmp_path / "mine", {"cat": 3})
    assert f"{tmp_path}/mine contains one class only (cat), but at least two" in refusal(tmp_path / "mine", tmp_path)


def test_training_without_test_images_is_refused(tmp_path):
    write_classes(tmp_path / "mine/train", {"a": 1, "b": 1})
    assert "contains train/, but neither test/ nor val/" in refusal(tmp_path / "mine", tmp_path)


def test_an_empty_class_folder_is_refused(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1}, {"a": 1, "b": 1})
    (root / "train/c").mkdir()
    (root / "train/c/readme.md").write_text("soon")
    assert f"the class folder {root}/train/c contains no image (found: 1 .md)" in refusal(root, tmp_path)


def test_test_classes_that_differ_from_the_training_classes_are_refused(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1, "c": 1}, {"a": 1, "d": 1, "b": 1})
    message = refusal(root, tmp_path)
    assert "different classes. Only in training: c. Only in test: d." in message


def test_images_of_two_sizes_are_refused_without_image_size(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 2, "b": 1}, {"a": 1, "b": 1})
    write_image(root / "train/b/00.png", 3, size=(6, 4))
    message = refusal(root, tmp_path)
    assert f"{root}/train/a/00.png has 4 x 4 pixels, but {root}/train/b/00.png has 6 x 4 (width x height)" in message
    assert "Give image_size=N" in message


@pytest.mark.parametrize("damage", ["no image", "cut off"])
def test_an_unreadable_image_is_named(tmp_path, damage):
    root = write_parts(tmp_path / "mine", {"a": 2, "b": 1}, {"a": 1, "b": 1}, size=(64, 64))
    path = root / "train/a/01.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(b"<html>" if damage == "no image" else path.read_bytes()[:2000])
    message = refusal(root, tmp_path)
    assert f"{path} cannot be read as an image (" in message
    assert message.endswith("replace or remove this file")
    assert list((tmp_path / "image_cache").rglob("*.npy")) == []  # nothing is left, not even an unfinished file


def test_images_with_16_bits_are_refused(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1}, {"a": 1, "b": 1})
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(root / "test/b/00.png")
    assert f"{root}/test/b/00.png has pixels with more than 8 bits" in refusal(root, tmp_path)


def test_a_class_whose_only_image_is_held_out_is_named(tmp_path):
    order = np.random.RandomState(0).permutation(10)
    first = int(order[0])  # this image is in the test set, so give it a class of its own
    counts = {"a": first, "b": 1, "c": 9 - first}
    write_classes(tmp_path / "mine", {name: count for name, count in counts.items() if count})
    message = refusal(tmp_path / "mine", tmp_path)
    assert "the class b has 1 example(s), and the random fifth of all examples that becomes the test set" in message


# ---- Columns.


def test_columns_csv_gives_values_of_each_training_image(tmp_path):
    root = write_parts(tmp_path / "mine", {"a": 2, "b": 1}, {"a": 1, "b": 1})
    lines = ["file,date,size", "train/b/00.png,2020-01,3", "train/a/01.png,2019-05,10", "train/a/00.png,2021-07,2.5"]
    (root / "columns.csv").write_text("\n".join(lines))
    dataset = load_dataset(str(root), tmp_path)
    assert dataset.columns["date"].tolist() == ["2021-07", "2019-05", "2020-01"]
    assert dataset.columns["size"].tolist() == [2.5, 10.0, 3.0]


@pytest.mark.parametrize(
    ("text", "message_part"),
    [
        ("file,date\ntrain/a/00.png,1\n", "has no line for 1 training images, the first of which is train/b/00.png"),
        ("name,date\ntrain/a/00.png,1\n", "is 'name,date', but must be file,NAME,..."),
        ("file,date\ntrain/a/00.png,1\ntrain/b/00.png\n", "each line must have as many values"),
        (f"file,date\ntrain/a/00.png,x\ntrain/b/00.png,{'x' * 1001}\n", "contains a text of 1,001 characters"),
    ],
)
def test_a_columns_csv_that_does_not_fit_is_refused(tmp_path, text, message_part):
    root = write_parts(tmp_path / "mine", {"a": 1, "b": 1}, {"a": 1, "b": 1})
    (root / "columns.csv").write_text(text)
    assert message_part in refusal(root, tmp_path)
