"""Data for training: digits, files of MNIST, synthetic samples; and each rank's part."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from ringreduce.parallel import sampler
from ringreduce.train import Settings, data, load_digits, load_split
from tests.support.damage import flipped
from tests.support.mnist import mnist

RANKS = range(1, 10)

# --- the data ----------------------------------------------------------------------------------


def test_digits_are_complete():
    images, labels = load_digits()
    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0, 16)
    # The counts that the source states.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_hold_out_is_a_fifth_of_each_class():
    _, labels = load_digits()
    held = data.held_out(labels)
    for digit in range(10):
        assert abs(held[labels == digit].sum() - (labels == digit).sum() / 5) <= 0.5


def test_hold_out_is_always_the_same():
    _, labels = load_digits()
    digest = hashlib.sha256(np.packbits(data.held_out(labels)).tobytes()).hexdigest()
    assert digest == "ebf45f67cd7569e7eea115982fa51b27f451da4ccbf9e624def3e2d81e5e337e"


def test_split_puts_every_digit_on_one_side():
    images, labels = load_digits()
    split = load_split(np.float64)
    held = data.held_out(labels)
    assert np.array_equal(split.train_x * 16, images[~held])
    assert np.array_equal(split.held_out_x * 16, images[held])
    assert np.array_equal(split.train_labels, labels[~held])
    assert np.array_equal(split.held_out_labels, labels[held])


def truncated(packed):
    return packed[: len(packed) // 2]


def with_another_label(packed):
    return gzip.compress(gzip.decompress(packed)[:-2] + b"9\n")


@pytest.mark.parametrize("damage", [truncated, flipped, with_another_label])
def test_damaged_file_is_refused(damage, tmp_path):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(damage(data.DIGITS.read_bytes()))
    with pytest.raises(ValueError, match=r"digits\.csv\.gz is damaged.*install it again"):
        load_digits(path)


@pytest.mark.parametrize(
    ("seed", "epoch", "same"), [(5, 2, True), (5, 3, False), (6, 2, False), (2, 5, False)]
)
def test_order_depends_on_seed_and_epoch_alone(seed, epoch, same):
    assert np.array_equal(sampler.order(50, 5, 2), sampler.order(50, seed, epoch)) == same
    assert sorted(sampler.order(50, seed, epoch)) == list(range(50))


# --- noise ----------------------------------------------------------------------------------------

KEY = (5, 2, 7)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("width", [1, 5, 64])
def test_noise_belongs_to_a_row_whoever_computes_it(size, width):
    whole = data.noise(slice(0, 20), width, 0.2, KEY)
    parts = [data.noise(sampler.part(20, rank, size), width, 0.2, KEY) for rank in range(size)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("other", [(5, 2, 8), (5, 3, 7), (6, 2, 7), (2, 5, 7)])
def test_noise_depends_on_seed_epoch_and_batch(other):
    rows = slice(0, 3)
    assert not np.any(data.noise(rows, 8, 1.0, KEY) == data.noise(rows, 8, 1.0, other))


def test_noise_scales():
    rows = slice(0, 5)
    assert np.array_equal(data.noise(rows, 8, 0.5, KEY), data.noise(rows, 8, 1.0, KEY) / 2)
    assert not data.noise(rows, 8, 0.0, KEY).any()


def test_noise_is_normal():
    """Mean, deviation and tails of 200,000 values are within five standard errors."""
    values = data.noise(slice(0, 2000), 100, 1.0, KEY).reshape(-1).astype(np.float64)
    n = values.size
    assert abs(values.mean()) < 5 / np.sqrt(n)
    assert abs(values.var() - 1) < 5 * np.sqrt(2 / n)
    for threshold, share in [(1, 0.317311), (2, 0.045500), (3, 0.002700)]:
        error = 5 * np.sqrt(share * (1 - share) / n)
        assert abs((np.abs(values) > threshold).mean() - share) < error
    # Neighbouring values are not correlated.
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(n)


# --- synthetic ------------------------------------------------------------------------------------


def test_synthetic_samples_have_the_shapes_that_were_asked_for():
    split = data.synthetic(101, 7, 3, seed=1, dtype=np.float64)
    assert (split.train_x.shape, split.held_out_x.shape) == ((101, 7), (20, 7))
    assert split.train_x.dtype == np.float64
    assert set(split.train_labels) == {0, 1, 2}
    assert split.classes == 3


def test_synthetic_samples_depend_on_the_seed_alone():
    again = [data.synthetic(50, 4, 2, seed) for seed in (1, 1, 2)]
    assert np.array_equal(again[0].train_x, again[1].train_x)
    assert not np.array_equal(again[0].train_x, again[2].train_x)


def test_synthetic_samples_lie_around_centres_of_their_classes():
    split = data.synthetic(5000, 20, 4, seed=3)
    for label in range(4):
        centre = split.train_x[split.train_labels == label].mean(axis=0)
        assert np.linalg.norm(centre) == pytest.approx(4, abs=0.5)


# --- the files of MNIST ---------------------------------------------------------------------------


@pytest.mark.parametrize(("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz")])
def test_the_files_of_mnist_are_read_plain_or_packed(pack, suffix, tmp_path):
    arrays = mnist(tmp_path, pack, suffix)
    split = data.load(Settings(data=str(tmp_path), batch=8))
    images = arrays["train-images-idx3-ubyte"]
    assert np.array_equal(split.train_x, images.reshape(30, 12).astype(np.float32) / 255)
    assert split.train_x.dtype == np.float32
    assert np.array_equal(split.train_labels, arrays["train-labels-idx1-ubyte"])
    assert np.array_equal(split.held_out_labels, arrays["t10k-labels-idx1-ubyte"])
    assert split.held_out_x.shape == (10, 12)
    assert split.name == tmp_path.name


def test_the_digest_is_that_of_what_is_trained_on():
    split = data.synthetic(50, 4, 2, 1)
    other = replace(split, train_labels=1 - split.train_labels)
    assert split.digest == data.synthetic(50, 4, 2, 1).digest != other.digest
