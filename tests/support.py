"""What the tests of data sets share: small data sets in files."""

import json
import shutil

import numpy as np
from conftest import make_folder
from PIL import Image


def make_femnist(root, users=(12, 3, 7, 20, 5, 9)):
    """Write FEMNIST; return {"train" or "test": {user: x and y}}; f99_12 has test samples alone."""
    rng = np.random.default_rng(0)
    names = [f"f{i:02d}_{n}" for i, n in enumerate(users)]
    content = {"train": {}, "test": {}}
    for part, shards in (("train", [names[:4], names[4:]]), ("test", [[*names, "f99_12"]])):
        folder = root / "femnist" / part
        folder.mkdir(parents=True, exist_ok=True)
        share = 1 if part == "train" else 3
        for i, shard in enumerate(shards):
            counts = [max(1, int(name[4:]) // share) for name in shard]
            data = {}
            for name, n in zip(shard, counts):
                x = (rng.integers(256, size=(n, 784)) / 255).tolist()
                data[name] = {"x": x, "y": rng.integers(62, size=n).tolist()}
            text = json.dumps({"users": shard, "num_samples": counts, "user_data": data})
            (folder / f"all_data_{i}_{part}.json").write_text(text)
            content[part] |= data
    return content


def make_tiny_imagenet(root, wnids=("n03", "n01", "n02"), size=64):
    """Write Tiny-ImageNet, three training images a class and a test image; return its folder."""
    rng = np.random.default_rng(0)
    root = root / "tiny-imagenet-200"
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for i, wnid in enumerate(wnids):
        folder = root / "train" / wnid
        (folder / "images").mkdir(parents=True)
        for j in range(3):
            pixels = rng.integers(256, size=(size, size, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{wnid}_{j}.JPEG")
        grey = Image.fromarray(np.full((size, size), 50 * i, np.uint8))  # grey ones exist
        grey.save(root / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def make_imagenet(root):
    """Write folders of nine classes, of which three are drawn, with four of their six images."""
    rng = np.random.default_rng(0)
    for i in range(9):
        for part, count in (("train", 6), ("val", 2)):
            folder = root / "imagenet" / part / f"n{i:08d}"
            folder.mkdir(parents=True)
            for j in range(count):
                squares = rng.integers(256, size=(3, 4, 3))
                pixels = np.kron(squares, np.ones((16, 16, 1))).astype(np.uint8)  # 64 x 48
                Image.fromarray(pixels).save(folder / f"{j}.JPEG", format="PNG")
    return root / "imagenet"


def make_clients(root, clients=("zoe", "amy", "bob")):
    """Write train/CLIENT/CLASS/* and test alike; amy has no bee. Return root."""
    for client in clients:
        make_folder(root / "made" / client)
        for part in ("train", "test"):
            (root / part).mkdir(exist_ok=True)
            (root / "made" / client / part).rename(root / part / client)
            if client == "amy":
                shutil.rmtree(root / part / client / "bee")
    return root


def make_mnist(root, name, train, test):
    """Write so many random images in MNIST's files, root/name/raw/*."""
    folder, rng = root / name / "raw", np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, n in (("train", train), ("t10k", test)):
        for kind, magic, shape in (("images-idx3", 2051, (n, 28, 28)), ("labels-idx1", 2049, (n,))):
            values = rng.integers(10 if len(shape) == 1 else 256, size=shape)
            content = np.array([magic, *shape], ">i4").tobytes() + values.astype("u1").tobytes()
            (folder / f"{part}-{kind}-ubyte").write_bytes(content)


def make_sent140(root, users=(("ann", 12), ("bob", 8), ("cy", 5), ("dee", 1)), seed=0):
    """Write Sentiment140's CSV under root; return its rows (user, label, text)."""
    rng, rows, lines = np.random.default_rng(seed), [], []
    for user, n in users:
        for label in rng.integers(2, size=n):
            letters = " ".join(rng.choice(list("pqrstuvw"), rng.integers(1, 6)))
            mood = "glad" if label else "sad"
            text, date = f"{user} is {mood} today, {letters}!", "Mon Apr 06 22:19:45 PDT 2009"
            lines.append(f'"{4 * label}","{len(rows)}","{date}","NO_QUERY","{user}","{text}"\n')
            rows.append((user, label, text))
    (root / "sent140").mkdir(parents=True, exist_ok=True)
    (root / "sent140" / "tweets.csv").write_text("".join(lines), encoding="latin-1")
    return rows


def text_flags(root, *argv):
    words = "--dataset sent140 --model lstm --vectors random --batch-size 5".split()
    return [*words, "--data-dir", str(root), *argv]
