"""The rows of a table: what each says of its setting and method, and what they all share."""

import typing

from reproduce.runs import MACHINE_FLAGS, SETTING_FLAGS, Group, as_text, differing_code


class Row(typing.NamedTuple):
    setting: str
    method: str
    group: Group


def table_rows(groups, names=None):
    """Return the Rows of groups.

    names: {run folder: [(setting, method), ...]}, a row each; rows without a name are named after
    the flags that differ between groups.
    """
    names = names or {}
    rows = []
    for group in groups:
        labels = names.get(str(group.runs[0].path))
        if not labels:
            labels = [(setting_label(group, groups), method_label(group, groups))]
        rows += [Row(setting, method, group) for setting, method in labels]
    return without_shared_parts(rows) if names else rows


def setting_label(group, groups):
    """Return the flags of the setting that differ between groups, as text."""
    flags = differing_flags(SETTING_FLAGS, groups)
    if group.flags["dataset"] != "folder" and "data_dir" in flags:
        flags.remove("data_dir")
    parts = [f"{flag} {as_text(group.flags[flag])}" for flag in flags if has(group, flag)]
    return ", ".join(parts)


def method_label(group, groups):
    """Return the method and those of its flags that differ between its groups, as text.

    A method is a script or, where a script ran with several, its server optimizer.
    """
    groups = [other for other in groups if other.script == group.script]
    name, server = group.script, group.flags.get("server")
    if len({other.flags.get("server") for other in groups}) > 1:
        groups = [other for other in groups if other.flags.get("server") == server]
        name = {"avgm": "FedAvgM", "adam": "FedADAM"}.get(server, name)
        name += f" ({group.script})" * (name != group.script != "fedavg")
    flags = [flag for flag in group.flags if flag not in {*SETTING_FLAGS, *MACHINE_FLAGS, "seed"}]
    parts = [f"{flag}={as_text(group.flags[flag])}" for flag in differing_flags(flags, groups)]
    return " ".join([name, *parts, *code_labels(group, groups)])


def code_labels(group, groups):
    """Return what tells a group's code from that of groups of the same script, as texts.

    It is a function's name, with its digest where names are the same.
    """
    if group.code is None:
        recorded = any(other.code for other in groups if other.script == group.script)
        return ["(code not recorded)"] if recorded else []
    labels = []
    for part, texts in differing_code(group, groups).items():
        names = {text.split(" ")[0] for text in texts}
        text = group.code.get(part, "none")
        short = text.split(" ")[0] if len(names) == len(texts) else text.replace(" ", " #")
        labels.append(f"{part}={short}")
    return labels


def differing_flags(flags, groups):
    """Return those of the flags that have several values among groups."""
    return [flag for flag in flags if len({as_text(g.flags.get(flag)) for g in groups}) > 1]


def has(group, flag):
    return group.flags.get(flag) is not None


def without_shared_parts(rows):
    """Return Rows whose settings, as in "CIFAR-10 C=16;R=25", lack the parts that all have."""
    parts = [row.setting.replace(";", " ").split(" ") for row in rows]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    settings = [" ".join(word for word in words if word not in shared) for words in parts]
    return [row._replace(setting=setting) for row, setting in zip(rows, settings)]


def shared_setting(groups):
    """Return the flags of the setting that all groups share, as text; those that act alone."""
    differing = differing_flags(SETTING_FLAGS, groups)
    flags = groups[0].flags
    idle = set(differing)
    if flags["dataset"] != "folder":
        idle.add("data_dir")
    if not str(flags.get("partition")).startswith("dirichlet"):
        idle.add("alpha")
    if flags.get("partition") != "similarity":
        idle.add("similarity")
    shared = [flag for flag in SETTING_FLAGS if flag not in idle and has(groups[0], flag)]
    return ", ".join(f"{flag} {as_text(flags[flag])}" for flag in shared)
