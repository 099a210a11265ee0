"""What comes from Python instead of a command line: flags by name."""

import common


def args_for(script, values):
    """Return the parsed flags of a script, a module; see common.args_for()."""
    known, words = common.flags("", script.__name__)._option_string_actions, []
    for name, value in values.items():
        flag = common.canonical(f"--{name}")
        off = f"--no-{flag[2:]}"
        if value is True:
            words.append(flag)
        elif value is False:  # the default of a flag that can only be switched on
            words += [off] if off in known or flag not in known else []
        elif value is not None:
            listed = isinstance(value, (list, tuple))
            words.append(f"{flag}={','.join(map(str, value)) if listed else value}")
    return script.main(words, run=lambda args, *_, **__: args)
