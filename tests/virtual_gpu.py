"""A virtual GPU: run() with --device cuda on a machine without one, and what would fail is seen.

    python tests/virtual_gpu.py "fedprox --mu 0.1" moon     cases, by default all

A tensor on cuda:0 is a Virtual, which wraps a tensor of the CPU and computes with it. Seen are
    devices   operations on tensors of both devices, but for copies, indices and scalars
    waits     in a capture: what reads a value or copies from or to the CPU
    graphs    a capture executes nothing; a replay repeats its operations on the same memory, and
              then spoils what the rules of a shared pool let it spoil: its own temporaries, all
              memory of graphs captured later, what earlier ones had freed when it was captured
    streams   vector clocks: what is read, written or freed while another stream may still use it
    sgd       strides that its fused kernel refuses
Not seen: kernels, whether they are deterministic, precision, how much memory there is, speed.
FakeTensorMode does not do: without a driver autograd refuses tensors that claim to be on cuda:0.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import io
import pathlib
import sys
import tempfile
import time
import warnings
import weakref
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import common  # noqa: E402
import run_folder  # noqa: E402
import extras.glyphs  # noqa: E402
from analysis import synthetic  # noqa: E402
from methods import METHODS, VARIANTS, needed  # noqa: E402

aten, CUDA = torch.ops.aten, torch.device("cuda:0")
COPIES = {aten.copy_, aten._foreach_copy_, aten._to_copy}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
WAITING = "is_nonzero nonzero masked_select equal bincount histc _unique2 unique_dim".split()
WAITING += ["unique_consecutive", "_local_scalar_dense"]  # the last: .item(), float(), bool()
WAITING = {getattr(aten, name) for name in WAITING}


class Machine:
    """The GPU's state. faults: what was found, as text; memory: bytes free and in all."""

    def __init__(self, memory=(80 * 2**30, 80 * 2**30), reserved=8 * 2**30):
        self.faults, self.memory, self.reserved = [], memory, reserved
        self.host, self.streams = {}, []  # the host's clock: what it knows to be done
        self.blocks, self.pinned = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()
        self.capture, self.graphs, self.replays, self.watched = None, [], 0, False
        self.current, self.on = None, True

    def fault(self, text):
        if text not in self.faults:
            self.faults.append(text)

    def wait(self, what):
        """Let the host wait for the current stream, which a capture forbids."""
        if self.capture:
            self.fault(f"{what} inside a capture")
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        join(self.host, current_stream().clock)


gpu = Machine()


def key(tensor):
    """Return what names the memory of a CPU tensor."""
    return tensor.untyped_storage()._cdata


# --- streams and their clocks


class Stream:
    """A stream, with a clock {stream: how far of it is done when this one goes on}."""

    def __init__(self, device=None):
        self.number, self.clock = len(gpu.streams), {}
        gpu.streams.append(self)

    def wait_stream(self, other):
        join(self.clock, other.clock)


def join(clock, other):
    """Let a clock know all of another."""
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick


def knows(clock, other):
    """Return whether a clock knows all of another."""
    return all(clock.get(number, 0) >= tick for number, tick in other.items())


@contextlib.contextmanager
def stream(new):
    before, gpu.current = gpu.current, new
    try:
        yield
    finally:
        gpu.current = before


def current_stream(device=None):
    return gpu.current


def synchronize(device=None):
    for each in gpu.streams:
        join(gpu.host, each.clock)


class Block:
    """A piece of memory: how large, which stream it is of, and who has used it last."""

    def __init__(self, size):
        self.bytes = size
        self.gpu, self.stream = gpu, current_stream()
        self.written, self.read, self.graph = {}, {}, gpu.capture

    def __del__(self):
        if self.gpu.on and not self.graph:
            clock = dict(self.stream.clock)
            join(clock, self.gpu.host)
            if not knows(clock, self.written) or not knows(clock, self.read):
                self.gpu.fault("memory is freed while another stream may use it")


def use(read, written, what):
    """Let the current stream read and write blocks; note races."""
    now = current_stream()
    number, clock = now.number, now.clock
    join(clock, gpu.host)
    clock[number] = tick = clock.get(number, 0) + 1
    for block in read:
        if not knows(clock, block.written):
            gpu.fault(f"race: {what} reads what another stream writes")
        block.read[number] = tick
    for block in written:
        if not knows(clock, block.written) or not knows(clock, block.read):
            gpu.fault(f"race: {what} writes what another stream uses")
        block.written, block.read = {number: tick}, {}


# --- tensors


class Virtual(torch.Tensor):
    """A tensor that claims to be on cuda:0; held is the CPU's."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner):
        places = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        kind = {"dtype": inner.dtype, "device": "cpu"}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **places, **kind)
        self.held, self.block = inner, gpu.blocks.get(key(inner))
        if self.block is None:
            self.block = gpu.blocks[key(inner)] = Block(inner.untyped_storage().nbytes())
        return self

    def __deepcopy__(self, memo):
        new = made(self.held.detach().clone()).requires_grad_(self.requires_grad)
        use([self.block], [], "deepcopy")
        if getattr(self, "_is_param", False):
            new._is_param = True
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol):
        return self.held.__reduce_ex__(protocol)

    def __repr__(self):
        return f"Virtual({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, operator = kwargs or {}, func.overloadpacket
        tensors = common.tensors_in((args, kwargs))
        ours = [t for t in tensors if isinstance(t, Virtual)]
        check(func, args, kwargs, [t for t in tensors if not isinstance(t, Virtual)])
        inner_args, inner_kwargs = common.tree_map(held, args), common.tree_map(held, kwargs)
        if gpu.capture:
            gpu.capture.before([t.held for t in ours])
            gpu.capture.constants |= {key(t) for t in tensors if not isinstance(t, Virtual)}
        out = func(*inner_args, **inner_kwargs)
        computes = not func.is_view and operator not in (aten.detach, aten.alias)
        if computes:
            if gpu.capture:
                gpu.capture.calls.append((func, inner_args, inner_kwargs, common.tensors_in(out)))
            written = [t.block for t in mutated(func, args, kwargs) if isinstance(t, Virtual)]
            use([t.block for t in ours if t.block not in written], written, operator.__name__)
        first = args[0] if args else None
        if isinstance(first, (list, tuple)):
            first = first[0]
        if operator in COPIES and torch.is_tensor(first) and not isinstance(first, Virtual):
            return args[0]  # to the CPU
        new = common.tree_map(Virtual, out)
        fresh = [t.block for t in common.tensors_in(new) if not t.block.written]
        use([], fresh if computes else [], operator.__name__)
        aliases = any(returned.alias_info for returned in func._schema.returns)
        return return_and_correct_aliasing(func, args, kwargs, new) if aliases else new


def held(tensor):
    return tensor.held if isinstance(tensor, Virtual) else tensor


def mutated(func, args, kwargs):
    """Return the tensors to which an operation writes."""
    places = enumerate(func._schema.arguments)
    written = [(i, a.name) for i, a in places if a.alias_info and a.alias_info.is_write]
    return common.tensors_in([args[i] if i < len(args) else kwargs.get(k) for i, k in written])


def check(func, args, kwargs, plain):
    """Note, and raise, what CUDA would not do with these, of which plain are on the CPU."""
    operator, written = func.overloadpacket, mutated(func, args, kwargs)
    if operator in WAITING:
        gpu.wait(operator.__name__)
    if operator in INDEXING:
        masks = [i for i in args[1] if torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8)]
        if masks or (plain and isinstance(args[0], Virtual)):
            gpu.wait("a mask, or a tensor on the CPU, as an index")
            return
    if operator in COPIES and plain:
        to_cpu = isinstance(args[0], torch.Tensor) and not isinstance(args[0], Virtual)
        if to_cpu or not all(key(t) in gpu.pinned for t in plain):
            gpu.wait("a copy between CPU and GPU")
    elif any(t.ndim for t in plain) or not all(isinstance(t, Virtual) for t in written):
        gpu.fault(f"{func}: tensors on cuda:0 and cpu")
        raise RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu")
    if operator is aten._fused_sgd_:
        for first, *others in zip(*(tensors for tensors in args[:3] if tensors)):
            strides = [[s for n, s in zip(t.shape, t.stride()) if n > 1] for t in (first, *others)]
            if any(s != strides[0] for s in strides):
                gpu.fault(f"fused SGD on strides {strides}")


# --- what makes tensors, and moves them


def made(inner, wait=None):
    """Return a new tensor on the GPU; wait: what the host does if it waits for it."""
    if wait:
        gpu.wait(wait)
    new = Virtual(inner)
    if gpu.capture:  # a replay makes it anew
        gpu.capture.calls.append((inner.clone().clone, (), {}, [inner]))
    use([], [new.block], "a factory")
    return new


def moved(tensor, device, dtype=None, **options):
    """Return tensor.to(device, dtype, **options)."""
    here, options["dtype"] = isinstance(tensor, Virtual), dtype or tensor.dtype
    if here == (device.type == "cuda"):
        return torch.Tensor.to(tensor, **options)
    if here:
        gpu.wait("a copy to the CPU")
        use([tensor.block], [], "a copy to the CPU")
        return tensor.held.detach().to(**options | {"copy": True})
    wait = None if key(tensor) in gpu.pinned else "a copy of unpinned memory"
    new = made(tensor.detach().to(**options | {"copy": True}), wait)
    return new.requires_grad_(tensor.requires_grad and tensor.is_leaf)


class Devices(TorchFunctionMode):
    """Lets tensors be made on cuda:0, and moved there and back."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, first = kwargs or {}, args[0] if args else None
        here = isinstance(first, Virtual)
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            place = {"cpu": ["cpu"], "cuda": ["cuda:0"]}.get(func.__name__, args[1:])
            if place and isinstance(place[0], torch.Tensor):
                place = place[0].device, place[0].dtype
            copy = kwargs.pop("copy", False)
            device, dtype, _, form = torch._C._nn._parse_to(*place, **kwargs)
            return moved(first, device or first.device, dtype, copy=copy, memory_format=form)
        if func is torch.Tensor.pin_memory:
            out = first.clone()
            gpu.pinned[key(out)] = out
            return out
        if here and func is torch.Tensor.tolist:
            gpu.wait("tolist()")
            return first.held.tolist()
        if here and func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "meta":
            return func(*args, **kwargs)
        on_gpu = torch.device(device).type == "cuda"
        if func in (torch.tensor, torch.as_tensor) and isinstance(first, torch.Tensor):
            return moved(first, torch.device(device))
        args = common.tree_map(held, args)
        out = func(*args, **kwargs | {"device": "cpu"})
        if not on_gpu:
            return out
        numbers = func in (torch.tensor, torch.as_tensor)
        return made(out, "a tensor of Python's numbers" if numbers else None)


# --- graphs


class CUDAGraph:
    """The operations of a capture, on tensors that stay where they are."""

    def __init__(self):
        self.calls, self.constants = [], set()  # memory of scalars on the CPU
        self.outside, self.own = {}, {}  # memory, by key: that was there before, and of the pool

    def pool(self):
        return self.memory

    def before(self, tensors):
        """Keep what the tensors from outside hold, since a capture does not execute."""
        for t in tensors:
            block = gpu.blocks[key(t)]
            if block.graph is not self and key(t) not in self.outside:
                storage = t.untyped_storage()
                self.outside[key(t)] = storage, storage.clone(), block

    def end(self):
        """Take back what the capture has written; note the memory that replays use."""
        self.written = []
        for storage, content, block in self.outside.values():
            if not torch.equal(as_bytes(storage), as_bytes(content)):
                self.written.append(weakref.ref(block))
                storage.copy_(content)
        self.outside = {k: weakref.ref(block) for k, (_, _, block) in self.outside.items()}
        for _, args, kwargs, outs in self.calls:
            for t in common.tensors_in((args, kwargs, outs)):
                if key(t) not in self.outside and key(t) not in self.constants:
                    self.own[key(t)] = t.untyped_storage()
        gpu.graphs.append(self)

    @torch.no_grad()
    def replay(self):
        gpu.replays += 1
        for func, args, kwargs, outs in self.calls:
            for old, new in zip(outs, common.tensors_in(func(*args, **kwargs))):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        blocks = [block() for block in self.outside.values()]
        if None in blocks:
            gpu.fault("a graph uses memory that has been freed since its capture")
        use([b for b in blocks if b], [b() for b in self.written if b()], "a replay")
        spoilt = [storage for k, storage in self.own.items() if k not in gpu.blocks]
        for other in gpu.graphs[gpu.graphs.index(self) + 1 :]:
            spoilt += other.own.values() if other.memory is self.memory else []
        for storage in spoilt:
            as_bytes(storage).fill_(63)  # 0.747, if of floats


def as_bytes(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextlib.contextmanager
def graph(new, pool=None, stream=None, capture_error_mode="global"):
    synchronize()
    new.memory, gpu.capture, drawn = pool or object(), new, torch.get_rng_state()
    try:
        with globals()["stream"](stream):
            yield
        if gpu.watched and capture_error_mode == "global":
            raise RuntimeError("operation not permitted when stream is capturing: by a thread")
    finally:
        gpu.capture = None
        torch.set_rng_state(drawn)
        new.end()


# --- the machine


@contextlib.contextmanager
def machine(**options):
    """Give this process the virtual GPU, a Machine with options, and return it."""
    global gpu
    gpu = Machine(**options)
    gpu.current = Stream()
    autocast, group = torch.autocast, torch._C._group_tensors_by_device_and_dtype

    def grouped(lists, with_indices=False):
        on_gpu = any(isinstance(t, Virtual) for t in lists[0])
        groups = group(lists, with_indices).items()
        return {(CUDA if on_gpu else device, kind): v for (device, kind), v in groups}

    stubs = {
        "Stream": Stream,
        "stream": stream,
        "current_stream": current_stream,
        "graph": graph,
        "CUDAGraph": CUDAGraph,
        "synchronize": synchronize,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: "virtual",
        "mem_get_info": lambda device=None: gpu.memory,
        "max_memory_reserved": lambda device=None: gpu.reserved,
        "memory_reserved": lambda device=None: gpu.reserved,
        "memory_allocated": lambda device=None: sum(b.bytes for b in [*gpu.blocks.values()]),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    nothing = "set_device reset_peak_memory_stats empty_cache manual_seed_all".split()
    stubs |= dict.fromkeys(nothing, lambda *args, **options: None)
    # the CPU's list of what runs in bf16 is another one than CUDA's
    patches = [
        mock.patch.multiple(torch.cuda, **stubs),
        mock.patch.object(torch, "autocast", lambda _, *a, **k: autocast("cpu", *a, **k)),
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped),
        mock.patch.object(torch.nn.RNNBase, "flatten_parameters", lambda self: None),
    ]
    kinds = [torch.Tensor, torch.nn.Parameter, Virtual]
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        patches.append(mock.patch(f"{module}._foreach_supported_types", kinds))
    with contextlib.ExitStack() as stack:
        for patch in [*patches, Devices()]:
            stack.enter_context(patch)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        try:
            yield gpu
        finally:
            gpu.on = False
            gpu.graphs.clear()


# --- runs on it, against the CPU's


SMALL = "--dataset glyphs --clients 2 --rounds 2 --local-steps 3 --batch-size 8 --partition iid"
SMALL = [*SMALL.split(), *"--quiet --lr-decay 0.9 --lr 0.005".split()]


def train(case, device, out, **own):
    """Run a case, SCRIPT FLAGS after what is special about it.

    Return the weights and what clients keep in a run folder, {name: tensor} on the CPU."""
    kept, write = {}, run_folder.States.write

    def noted(states, client, state, t):
        kept.update({f"{client} keeps {i}": v for i, v in enumerate(common.tensors_in(state))})
        return write(states, client, state, t)

    base, (kind, *words) = SMALL, case.split()
    if kind not in ("text", "resume", "given"):
        kind, words = "", case.split()
    if kind == "text":
        own = synthetic.text(54, 7)
        base = [*SMALL[2:], "--augment", "none"]
    if kind == "given":  # on the GPU already
        own = {"data": extras.glyphs.glyphs().to(torch.device(device))}
    main = importlib.import_module(words[0]).main
    run = functools.partial(common.run, **own)
    argv = [*base, "--model", "resnet8", "--workers", "1", *words[1:], "--device", device]
    argv += [] if "--plain" in words else ["--out", str(out)]
    if kind == "resume":
        main([*argv, "--rounds", "1"], run=run)
        argv = ["--resume", "--rounds", "2", "--quiet", "--out", str(out)]
    with mock.patch.object(run_folder.States, "write", noted):
        net, _ = main(argv, run=run)
    return {k: getattr(v, "held", v).double() for k, v in {**net.state_dict(), **kept}.items()}


def compare(case, **own):
    """Return what is wrong with a case on the virtual GPU, a list of text.

    own: data and net, in place of small glyphs and --model."""
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
        enter, out = stack.enter_context, pathlib.Path(out)
        enter(mock.patch.object(extras.glyphs, "GLYPHS", (40, 12)))
        enter(mock.patch.object(common, "CORES", 1))
        gc.freeze()  # what is there is not looked through for what the run leaves
        stack.callback(gc.unfreeze)
        if case.startswith("text"):  # oneDNN's LSTM cannot be replayed
            enter(warnings.catch_warnings(action="ignore"))
            enter(torch.backends.mkldnn.flags(enabled=False))
        expected = train(case, "cpu", out / "cpu", **own)
        said = enter(contextlib.redirect_stderr(io.StringIO()))
        try:
            with machine() as found:
                weights = train(case, "cuda", out / "cuda", **own)
                gc.collect()
        except Exception as e:
            return [f"{type(e).__name__}: {e}", *found.faults]
    problems = [*found.faults, *said.getvalue().splitlines()]
    pairs = [(weights[k], v) for k, v in expected.items() if v.numel()]
    off = max(float((w - v).abs().max() / v.abs().max().clamp(min=1)) for w, v in pairs)
    # RMSprop divides gradients by their own size, those too that are rounding alone
    if not off <= (1e-4 if "rmsprop" in case else 1e-7):
        problems.append(f"weights or states differ by {off:.3g} from the CPU's")
    if not found.replays and not {"--no-graph", "--plain"} & set(case.split()):
        problems.append("no graph was replayed")
    return problems


def listed(text):
    return [" ".join(case.split()) for case in text.split(";")]


VARIED = [" ".join([name, *needed(name, ["--model"]), *more.split()]) for name, more in VARIANTS]
VARIED = [case.replace("resnet56", "resnet8") for case in VARIED]
# cnn takes less time; on resnet8 are methods with an own way to treat blocks, batch norm or modes
ON_RESNET = "fedavg moon stochdepth fedalign fedmlb fedkd qfedavg ditto fedbn".split()
ON_RESNET += [case for case in VARIED if case.startswith("stochdepth") or "--model" in case]
SUITE = [case if case in ON_RESNET else f"{case} --model cnn" for case in VARIED]
SUITE += listed("""fedavg --model cnn --workers 3 --clients 5; fedavg --plain;
fedavg --model cnn --workers auto --clients 5; gradaug --model cnn --workers 2 --rounds 1;
gradaug --mu 0 --model cnn; fedavg --augment rotate10,crop,flip --clip 1 --momentum 0;
resume rfedavg --model cnn; fedavg --precision bf16; given fedavg --model cnn;
fedavg --model cnn --optimizer rmsprop --lr 1e-4 --clip 1 --persist-opt;
text fedavg --optimizer rmsprop --lr 1e-4 --momentum 0""")
NO_CNN = ("stochdepth", "fedbn")  # which they refuse
CASES = SUITE + VARIED
CASES += [f"{case} --model cnn" for case in VARIED[: len(METHODS)] if case not in NO_CNN]
CASES += [f"fedavg --model {net}" for net in [*common.NETS, *common.EXTRA_NETS] if net != "lstm"]
CASES += listed("""fedavg --local-steps 24 --clients 3; moon --workers auto --clients 5;
fedcka --similarity-metric frobenius; fedcka --similarity-metric cosine;
scaffold --correction step --momentum 0;
scaffold --optimizer rmsprop --lr 1e-4 --option 1 --correction step;
scaffold --drop-last --partition dirichlet --min-size 3 --alpha 0.2 --clients 4;
fedmlb --pathways 1,2 --divisor all; fedmlb --precision bf16; fedalign --precision bf16;
rfedavg --sample 0.5 --rounds 3; gradaug --subnets 4; gradaug --resolutions 24,32; gradaug --mu 0;
gradaug --clients 5 --workers 3; fedalign --model resnet18-gn; fedalign --mu 0 --clip 0;
fedavg --persist-opt --sample 0.5 --rounds 3; fedavg --server avgm; fedavg --server adam;
fedavg --precision fp32; fedavg --deterministic; fedavg --drop-last; fedavg --client-test;
fedavg --epochs 9 --local-steps 27; fedavg --validation 0.2; fedavg --save-clients;
fedavg --weighting uniform --no-nesterov; moon --projection 16; resume scaffold --model cnn;
resume fedgkd; resume rfedavg_dp --noise-clip 1; resume fedavg --persist-opt; text fedavg;
text fedmlb; text fedcka --mu 1; text scaffold --option 1; text rfedavg; text qfedavg;
text fedavg --precision bf16; text moon; moon --plain; gradaug --plain; rfedavg --plain;
fedavg --no-graph; resume feddyn; gradaug --workers 2; resume rfedavg; given fedavg;
fedavg --optimizer rmsprop --lr 1e-4 --clip 1 --persist-opt""")
CASES = list(dict.fromkeys(CASES))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help="default: all")
    cases, failed = parser.parse_args(argv).cases, 0
    for case in cases:
        start = time.perf_counter()
        problems = compare(case)
        failed += bool(problems)
        seconds = time.perf_counter() - start
        print("FAIL" if problems else "ok  ", f"{case:70} {seconds:5.1f} s", flush=True)
        print("".join(f"     {problem}\n" for problem in problems), end="", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} cases")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
