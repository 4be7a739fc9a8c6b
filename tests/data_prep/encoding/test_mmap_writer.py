import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset

from data_prep.encoding.mmap_writer import MMapWriter, best_dtype, sequence_sizes


@pytest.mark.parametrize("dictionary_size", [8, 65_496, 65_504, 70_000])
def test_the_type_is_the_one_that_fairseq_chooses(dictionary_size):
    assert np.dtype(best_dtype(dictionary_size)) == indexed_dataset.best_fitting_int_dtype(dictionary_size)


@pytest.mark.parametrize("dictionary_size", [1000, 70_000])
def test_files_are_byte_for_byte_those_of_fairseq(tmp_path, dictionary_size):
    sequences = [[5, 6, 2], [2], [dictionary_size - 1, 7, 8, 2]]
    builder = indexed_dataset.make_builder(str(tmp_path / "theirs.bin"), "mmap", dictionary_size)
    for sequence in sequences:
        builder.add_item(torch.IntTensor(sequence))
    builder.finalize(str(tmp_path / "theirs.idx"))
    with MMapWriter(tmp_path / "ours", best_dtype(dictionary_size)) as writer:
        writer.write(np.array(sequences[0] + sequences[1]), np.array([3, 1]))
        writer.write(np.array(sequences[2]), np.array([4]))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    assert (tmp_path / "ours.idx").stat().st_size == 26 + 3 * 12
    dataset = indexed_dataset.MMapIndexedDataset(str(tmp_path / "ours"))
    assert [dataset[index].tolist() for index in range(3)] == sequences


def test_pointers_are_counted_in_64_bits(tmp_path):
    # 40 000 sequences of 65 535 tokens of 2 bytes are 5.2 GB; only the index is written here.
    with MMapWriter(tmp_path / "large", "uint16") as writer:
        writer._sizes.append(np.full(40_000, 65_535, np.int32))
    pointers = np.fromfile(tmp_path / "large.idx", dtype=np.int64, offset=26 + 4 * 40_000)
    assert pointers.tolist() == [number * 65_535 * 2 for number in range(40_000)]


def test_a_long_passage_is_stored_as_several_sequences():
    assert sequence_sizes(np.array([3, 65_535, 1])).tolist() == [3, 65_535, 1]
    assert sequence_sizes(np.array([3, 65_536, 131_070, 131_071])).tolist() == [
        3,
        *(65_535, 1),
        *(65_535, 65_535),
        *(65_535, 65_535, 1),
    ]


def test_a_failed_write_leaves_no_index(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), MMapWriter(tmp_path / "half", "uint16") as writer:
        writer.write(np.array([4, 2]), np.array([2]))
        raise RuntimeError("stop")
    assert not (tmp_path / "half.idx").exists()
