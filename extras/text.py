"""Text: Sentiment140 by user, its words and their vectors, and rFedAvg's LSTM."""

import csv
import itertools
import pathlib
import re
from collections import Counter

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import UserError

# --- Sentiment140


def load(args):
    """Return the data set args.dataset, sent140, from its folder under args.data_dir.

    UserError for flags that are of images, or of another partition."""
    for flag, wrong, why in (
        ("model", not args.model.startswith(("lstm", "own")), "sent140 is text; use lstm"),
        ("image-size", args.image_size, "of images, and sent140 is text"),
        ("augment", args.augment not in ("auto", "none"), "of images, and sent140 is text"),
        ("normalise", args.normalise != "dataset", "of images, and sent140 is text"),
        ("leak", args.leak and args.partition != "natural", "only for --partition natural"),
    ):
        if wrong:
            raise UserError(f"argument --{flag}: {why}")
    return sent140(pathlib.Path(args.data_dir) / "sent140", args)


def sent140(root, args, vocabulary=3000):
    """Return Sentiment140 (Go et al., 2009) by user, as rFedAvg's authors but for their leak.

    root holds the public CSV or LEAF's JSON shards. A tenth of the CSV, drawn at random, is the
    test set. The natural partitions take the tweets of the --users most active users, each of whom
    keeps one for training. Words are the vocabulary - 2 most frequent ones of the training tweets.
    With --leak (the authors') the test tweets are trained on too. UserError for damaged files."""
    y, text, users, test = _read(root)
    if args.partition in common.NATURAL:
        index = _most_active(users, test, args.users or args.clients)
        y, text, users = y[index], [text[i] for i in index], [users[i] for i in index]
        test = None if test is None else test[index]
    if test is None:
        test = _divide(users, args)
    if test.all() or not test.any():
        raise UserError(f"{root}: {len(y)} tweets are too few to train and to test on")
    x, words = _encode(text, ~test, vocabulary)
    writers = np.unique(users, return_inverse=True)[1]
    train = np.ones(len(y), bool) if args.leak else ~test
    fields = {"writers": writers[train], "writers_test": writers[test], "words": words}
    return common.Data(x[train], y[train], x[test], y[test], 2, **fields)


def _read(root):
    """Return labels (n,), a list of texts, a list of users, and which tweets are test ones.

    The last is (n,) bool, or None where the files do not say (the CSV)."""
    source = "http://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip"
    advice = f"put training.1600000.processed.noemoticon.csv of {source} there"
    paths = list(root.glob("*.csv"))
    if not paths and (root / "train").is_dir():
        return _read_leaf(root, advice)
    if len(paths) != 1:
        raise UserError(f"{root}: {len(paths) or 'no'} *.csv in it, where one is read; {advice}")
    return *_read_csv(paths[0]), None


def _read_csv(path):
    """Return labels (n,), 1 for polarity 4, texts and users of the public CSV."""
    y, text, users = [], [], []
    if not path.is_file():  # no read of a pipe may end
        raise UserError(f"{path}: not a regular file")
    # as published, with stray bytes of other encodings
    with open(path, encoding="latin-1", newline="") as f:
        rows = csv.reader(f, strict=True)
        try:
            for polarity, _, _, _, user, tweet in rows:
                y.append({"0": 0, "4": 1}[polarity])
                text.append(tweet)
                users.append(user)
        except (csv.Error, ValueError, KeyError) as e:
            columns = "polarity (0 or 4), id, date, query, user, text"
            raise UserError(f"{path}, line {rows.line_num}: not {columns} ({e})") from None
    return np.array(y, np.int64), text, users


def _read_leaf(root, advice):
    """Return labels, texts, users and which tweets are test ones, of LEAF's shards."""
    readers = common.import_extra("readers", "--dataset sent140 as LEAF's shards")
    x, y, x_test, y_test, users, users_test = readers.read_leaf(root, _leaf_tweets, advice)
    test = np.arange(len(y) + len(y_test)) >= len(y)
    users = np.concatenate([users, users_test]).tolist()
    return np.concatenate([y, y_test]), [*x, *x_test], users, test


def _leaf_tweets(x, y):
    """Return the texts and labels of a user's lists, as arrays.

    x: of [id, date, query, user, text, ...]; y: of 0, and 1 or 4."""
    labels = [{"0": 0, "1": 1, "4": 1}[str(label)] for label in y]
    if odd := [v for v in x if not (isinstance(v, list) and isinstance(v[4], str))]:
        raise ValueError(f"{odd[0]}, whose text is none")
    return np.array([tweet[4] for tweet in x], object), np.array(labels, np.int64)


def _most_active(users, test, count):
    """Return the indices of the tweets of the count users with the most tweets.

    users: of each tweet. test: which tweets are test ones, and do not count; None: all count."""
    tweets = Counter(users if test is None else itertools.compress(users, ~test))
    names = set(sorted(tweets, key=lambda user: (-tweets[user], user))[:count])
    return [i for i, user in enumerate(users) if user in names]


def _divide(users, args):
    """Return which tweets are test ones, (n,) bool: a tenth, drawn at random by --data-seed.

    With --partition natural and natural-iid a user's first tweet is for training if no other is."""
    n = len(users)
    test = np.ones(n, bool)
    test[common.seeded_rng("sent140", args.data_seed).permutation(n)[: int(0.9 * n)]] = False
    if args.partition in common.NATURAL:
        _, first, user = np.unique(users, return_index=True, return_inverse=True)
        counts = np.bincount(user[~test], minlength=len(first))  # training tweets of each user
        test[first[counts == 0]] = False
    return test


def _encode(text, train, vocabulary):
    """Return texts as numbers of words, (n, steps) int16, and the list of the words 2, 3, ...

    0 is padding, 1 any word outside of the vocabulary - 2 most frequent ones of the training tweets
    (equally frequent ones in alphabetical order). train: which tweets are training ones."""
    text = [tokens(line) for line in tqdm(text, "finding words", leave=False, disable=None)]
    counts = Counter(word for i in np.flatnonzero(train) for word in text[i])
    words = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    number = {word: i for i, word in enumerate(words, 2)}
    x = np.zeros((len(text), max(1, max(map(len, text)))), np.int16)
    for row, line in zip(x, text):
        row[: len(line)] = [number.get(word, 1) for word in line]
    return x, words


def tokens(text):
    """Return the lower-case words and marks of a text, by the rules of torchtext's basic_english.

    The marks .,()!?' are words; ":; and <br /> are not."""
    text = re.sub(r"[:;]|<br />", " ", text.lower().replace('"', ""))
    return re.sub(r"([.,()!?'])", r" \1 ", text).split()


# --- word vectors


def net_for(data, args):
    """Return the network that args name, with the vectors of the data's words."""
    vectors = word_vectors(args.vectors, data.words, args.data_seed)
    net = common.build_net(args.model, data.classes, *vectors.shape, args.projection)
    net[0][0].vectors.copy_(vectors)
    return net


def word_vectors(source, words, seed=0):
    """Return the vectors of padding, of all other words and of words: (2 + len(words), width).

    source: "random", N(0, 0.4^2), 300 wide, drawn by seed; or a text file as GloVe's, a word and
    its numbers on each line, where what it lacks is zero. UserError for a damaged file."""
    if source == "random":
        rng = common.seeded_rng("vectors", seed)
        vectors = rng.normal(0, 0.4, (len(words) + 2, 300)).astype(np.float32)
        vectors[0] = 0
        return torch.from_numpy(vectors)
    if not pathlib.Path(source).is_file():
        glove = "glove.6B.300d.txt of https://nlp.stanford.edu/data/glove.6B.zip, or random"
        raise UserError(f"--vectors {source}: no such file; {glove}")
    row = {word: i for i, word in enumerate(words, 2)}
    vectors, i = np.zeros((0, 0), np.float32), 0
    try:
        with open(source, "rb") as f, np.errstate(over="ignore"):  # inf is refused below
            lines = tqdm(f, "reading word vectors", leave=False, disable=None, unit=" lines")
            for i, line in enumerate(lines, 1):
                if i == 1:  # it says how wide they are; a word may hold spaces
                    width = line.count(b" ")
                    vectors = np.zeros((len(words) + 2, width), np.float32)
                word, *numbers = line.decode().rstrip().rsplit(" ", width)
                if word in row:
                    vectors[row[word]] = np.array(numbers, np.float32).reshape(width)
    except (OSError, ValueError) as e:
        raise UserError(f"--vectors {source}, line {i}: cannot be read ({e})") from None
    if not vectors.any() or not np.isfinite(vectors).all():
        found = "NaN or infinity" if vectors.any() else f"none of the data's {len(words)} words"
        raise UserError(f"--vectors {source}: holds {found}")
    return torch.from_numpy(vectors)


# --- the network


class Embedding(nn.Module):
    """Look up the vectors of words, which are not trained.

    (batch, steps) numbers of words -> (batch, steps, width + 1), whose last channel is 1 for a word
    and 0 for padding, number 0."""

    def __init__(self, words, width):
        super().__init__()
        self.register_buffer("vectors", torch.zeros(words, width))

    def forward(self, x):
        if x.is_floating_point():
            raise UserError("--model lstm: a method cannot mix or resize words as it does images")
        mask = (x != 0).unsqueeze(2).to(self.vectors)
        return torch.cat([F.embedding(x.int(), self.vectors), mask], 2)


class Recurrent(nn.Module):
    """An LSTM layer on (batch, steps, inputs + 1), whose last channel is 0 where there is padding.

    The output is (batch, steps, width + 1), 0 at padding and with the same last channel; with last
    it is the output at the last word alone, (batch, width)."""

    def __init__(self, inputs, width, last):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.last = last

    def train(self, mode=True):
        """Stay in training mode: it computes the same, and cuDNN's backward pass needs it."""
        return super().train()

    def forward(self, x):
        mask = x[:, :, -1:]  # (batch, steps, 1)
        with torch.autocast(x.device.type, enabled=False):  # cuDNN's would be fp16, not bf16
            h = self.lstm(x[:, :, :-1])[0] * mask
        if not self.last:
            return torch.cat([h, mask], 2)
        step = (mask.sum(1, keepdim=True).long() - 1).clamp(min=0)  # (batch, 1, 1)
        return h.gather(1, step.expand(-1, -1, h.shape[2])).squeeze(1)


def lstm(words, width):
    """The two-layer LSTM of rFedAvg for text, on the vectors, width wide, of so many words."""
    embedding = Embedding(words, width)
    first = nn.Sequential(embedding, Recurrent(width, 256, last=False))
    return [("lstm1", first), ("lstm2", Recurrent(256, 256, last=True))], 256
