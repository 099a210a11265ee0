"""Accuracies of --metric all, by the definitions of scikit-learn."""

import torch


def readings(y, predicted, classes):
    """Return balanced accuracy and macro F1 (%) of predicted labels, both (samples,) int64.

    balanced: mean, over the classes in y, of the share of a class's samples that is right
    (sklearn.metrics.balanced_accuracy_score). macro F1: mean, over the classes in y or predicted,
    of 2 TP / (2 TP + FP + FN) (sklearn.metrics.f1_score(average="macro"))."""
    classes = max(classes, int(predicted.max()) + 1)  # a network may have more outputs
    counts = torch.bincount(y * classes + predicted, minlength=classes**2).double()
    counts = counts.view(classes, classes)  # of each class, how many are taken for which
    right, true, told = counts.diagonal(), counts.sum(1), counts.sum(0)
    recalls, scores = right / true, 2 * right / (true + told)  # NaN without a sample
    found = {"balanced_acc": recalls.nanmean(), "macro_f1": scores.nanmean()}
    return {f"test_{name}": 100 * value.item() for name, value in found.items()}
