"""Data sets of images: glyphs, folders, torchvision's; statistics."""

import inspect
import pickle

import numpy as np
import pytest
import torch
from conftest import GLYPHS, flags, make_folder
from PIL import Image
from test_docs import ROOT, blocks_of

import common
import run_folder
import extras.glyphs
from extras import images


def test_glyphs_follow_the_seed_and_have_writers():
    assert GLYPHS == (20_000, 4_000)
    a, other = extras.glyphs.glyphs(), extras.glyphs.glyphs(seed=1)
    again = extras.glyphs._glyphs.__wrapped__((600, 200), 0)
    assert a.x.shape == (600, 3, 32, 32)
    assert a.x_test.shape == (200, 3, 32, 32)
    assert a.x.dtype == torch.uint8
    assert a.classes == 62
    assert torch.equal(a.x, again.x)
    assert torch.equal(a.y_test, again.y_test)
    assert not torch.equal(a.x, other.x)
    assert len(a.writers) == 600
    assert len(set(a.writers)) > 2
    # a writer's paper has one colour: corners vary less within a writer than between writers
    corner = a.x[:, :, :3, :3].double().mean((2, 3)).numpy()
    within = np.mean([corner[a.writers == w].var(0) for w in set(a.writers)])
    assert within < 0.5 * corner.var(0).mean()


def test_statistics_and_normalise():
    x = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
    data = common.Data(x, torch.zeros(50).long(), x, torch.zeros(50).long(), 2)
    pixels = x.numpy().astype(np.float64) / 255
    assert np.allclose(data.mean.flatten(), pixels.mean((0, 2, 3)), atol=1e-6)
    assert np.allclose(data.std.flatten(), pixels.std((0, 2, 3)), atol=1e-6)
    z = data.normalise(x).double()
    assert z.mean((0, 2, 3)).abs().max() < 1e-5
    assert (z.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_folder(tmp_path):
    root = make_folder(tmp_path)
    data = images.folder(root)
    assert data.x.shape == (6, 3, 12, 12)
    assert data.x_test.shape == (4, 3, 12, 12)
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.classes == 2
    image = torch.from_numpy(np.array(Image.open(root / "train/bee/1.png")))
    assert torch.equal(data.x[4], image.permute(2, 0, 1))
    assert images.folder(root, 8).x.shape == (6, 3, 8, 8)


def test_folder_decodes_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    root = make_folder(tmp_path)
    before = images.folder(root).x
    decode, calls = images.decode_images, []

    def counted(*args, **options):
        calls.append(args)
        return decode(*args, **options)

    monkeypatch.setattr(images, "decode_images", counted)
    assert torch.equal(images.folder(root).x, before)
    assert len(calls) == 0
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(root / "train/bee/1.png")
    assert images.folder(root).x[4].max() == 0
    assert len(calls) == 1
    next(root.glob(".cache-*.pt")).write_bytes(b"damaged")
    assert images.folder(root).x[4].max() == 0
    assert len(calls) == 2


def test_folder_keeps_grey_images_grey(tmp_path):
    root = make_folder(tmp_path, mode="L")
    assert images.folder(root).x.shape == (6, 1, 12, 12)
    Image.fromarray(np.full((12, 12, 3), (1, 2, 3), np.uint8)).save(root / "train/bee/2.png")
    data = images.folder(root)  # one in colour: all are read so
    assert data.x.shape == (6, 3, 12, 12)
    assert data.x[5, :, 0, 0].tolist() == [1, 2, 3]
    assert (data.x[0, 0] == data.x[0, 2]).all()


class Fake:
    """What torchvision's data sets hold."""

    def __init__(self, *shape):
        rng = np.random.default_rng(0)
        self.data = rng.integers(256, size=shape).astype(np.uint8)
        self.targets = [1] * shape[0]
        self.classes = list("0123456789")


def test_torchvision_layouts(monkeypatch):
    """CIFAR keeps an HWC numpy array and a list of labels, MNIST a tensor without channels."""
    from torchvision import datasets

    def cifar(root, train, download):
        return Fake(6 if train else 2, 32, 32, 3)

    def mnist(root, train, download):
        return Fake(6 if train else 2, 28, 28)

    monkeypatch.setattr(datasets, "CIFAR10", cifar)
    data = common.load_data(flags("--dataset", "cifar10"))
    assert data.x.shape == (6, 3, 32, 32)
    assert data.x_test.shape == (2, 3, 32, 32)
    assert data.classes == 10
    assert data.x[3, 1, 5, 7] == Fake(6, 32, 32, 3).data[3, 5, 7, 1]
    assert data.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    monkeypatch.setattr(datasets, "MNIST", mnist)
    data = common.load_data(flags("--dataset", "mnist", "--image-size", "16"))
    assert data.x.shape == (6, 1, 16, 16)
    assert data.x.dtype == torch.uint8


class FakeSVHN:
    """What torchvision's SVHN holds: labels, and an array in another order than its memory's."""

    def __init__(self, root, split, download):
        n = {"train": 6, "test": 2}[split]
        pixels = np.random.default_rng(0).integers(256, size=(32, 32, 3, n)).astype(np.uint8)
        self.data, self.labels = pixels.transpose(3, 2, 0, 1), np.arange(n) + 4


def test_svhn_and_fashion_mnist(tmp_path, monkeypatch):
    """Normalised by the mean and deviation of the training pixels; not augmented by default."""
    from torchvision import datasets

    assert [*inspect.signature(datasets.SVHN).parameters][:2] == ["root", "split"]
    monkeypatch.setattr(datasets, "SVHN", FakeSVHN)
    data = common.load_data(flags("--dataset", "svhn"))
    pixels = FakeSVHN(None, "train", True).data
    assert np.array_equal(data.x, pixels) and data.x.is_contiguous()
    assert (data.y.tolist(), data.y_test.tolist()) == ([4, 5, 6, 7, 8, 9], [4, 5])
    assert data.classes == len(data.names) == 10
    channels = pixels.transpose(1, 0, 2, 3).reshape(3, -1) / 255
    assert data.mean.flatten().tolist() == pytest.approx(channels.mean(1).tolist())
    assert data.std.flatten().tolist() == pytest.approx(channels.std(1).tolist())
    assert common.resolve_augment(flags("--dataset", "svhn"), data) == []
    folder, rng = tmp_path / "FashionMNIST" / "raw", np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, n in (("train", 8), ("t10k", 4)):  # in MNIST's format
        for name, magic, shape in (("images-idx3", 2051, (n, 28, 28)), ("labels-idx1", 2049, (n,))):
            content = np.array([magic, *shape], ">i4").tobytes()
            content += rng.integers(10, size=shape).astype("u1").tobytes()
            (folder / f"{part}-{name}-ubyte").write_bytes(content)
    data = common.load_data(flags("--dataset", "fashion-mnist", "--data-dir", str(tmp_path)))
    assert data.x.shape == (8, 1, 28, 28) and len(data.y_test) == 4
    assert data.names[9] == "Ankle boot"


def test_the_folder_that_the_page_writes(tmp_path, monkeypatch):
    """docs/data.md's lines on batches of CIFAR-10's format: by class, then by file name."""
    from torchvision.datasets import cifar

    rng, files = np.random.default_rng(0), [f"data_batch_{i}" for i in range(1, 6)]
    raw, written = tmp_path / "data" / "cifar-10-batches-py", {"train": {}, "test": {}}
    raw.mkdir(parents=True)
    classes = [f"class{c}" for c in "jihgfedcba"]
    (raw / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}))
    for file in [*files, "test_batch"]:
        pixels, labels = rng.integers(256, size=(20, 3072)).astype(np.uint8), [*range(10)] * 2
        names = [f"{rng.choice(['a', 'b'])}_s_{i:06}.png" for i in rng.permutation(10**6)[:20]]
        batch = {"data": pixels, "labels": labels, "filenames": names}
        (raw / file).write_bytes(pickle.dumps(batch))
        part = written["test" if file == "test_batch" else "train"]
        part |= {(classes[y], name): x for y, name, x in zip(labels, names, pixels)}
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    monkeypatch.chdir(tmp_path)
    [block] = [b for b in blocks_of(ROOT / "docs" / "data.md") if "CIFAR10" in b.text]
    exec(block.text, {})
    data = images.folder(tmp_path / "data" / "cifar10")
    assert data.names == sorted(classes)
    for part, x, y in (("train", data.x, data.y), ("test", data.x_test, data.y_test)):
        expected = [pixels for _, pixels in sorted(written[part].items())]
        assert np.array_equal(x.flatten(1).numpy(), np.stack(expected))
        assert [data.names[label] for label in y] == [key[0] for key in sorted(written[part])]


# --- caches: nothing of other files is read


@pytest.fixture
def cached(tmp_path):
    """A folder of images with its cache."""
    root = make_folder(tmp_path)
    images.folder(root)
    return root


def cache_of(root):
    (path,) = root.glob(images.CACHE)
    return path


def test_the_cache_of_other_files_is_made_again(cached, tmp_path):
    """As after a copy of one cache over another."""
    expected = images.folder(cached).x
    other = make_folder(tmp_path / "other", classes=("cat", "dog"))
    images.folder(other)
    content = run_folder.load(cache_of(other))
    content["tensors"]["images"].zero_()
    run_folder.save(content, cache_of(cached))
    assert torch.equal(images.folder(cached).x, expected)


def test_one_cache_is_kept(cached):
    """Other sizes and what kills have left go when one is written; other files stay."""
    name = cache_of(cached).name
    kept = [".cache-mine.pt", ".cache-mine.pt.1.tmp", "x.tmp"]
    for file in [*kept, f"{name}.1.tmp", ".cache-01234567.pt"]:
        (cached / file).write_text("some")
    images.folder(cached, 8)
    found = {path.name for path in cached.iterdir() if path.is_file()}
    assert found == {*kept, cache_of(cached).name}
    assert name not in found
