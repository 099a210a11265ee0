"""The whole federation without the speed: one client after the other, one batch after the other.

Read this first. It runs any method script, and ends with the weights of common.run() bit for bit
(on a CPU; a test holds every method to that), which adds workers side by side, CUDA graphs, run
folders and metrics without changing a number. Flags of these do nothing here.

    python plain.py fedprox --mu 0.1 --dataset glyphs --model cnn --clients 10 --rounds 5 \\
        --epochs 1 --lr 0.03
"""

import copy
import importlib
import pathlib
import sys

import torch

import common


class Worker:
    """What local_update gets: a network with the global weights, and a fresh optimizer."""

    def __init__(self, net, data, args, client, server):
        self.template, self.data, self.args = net, data, args
        self.device = data.y.device
        self.net = self.copy().train()
        self.lr = common.learning_rate(args, server["round"])
        self.opt = common.optimizer(self.net, args)
        self.opt.param_groups[0]["lr"] = self.lr
        self.key = (args.seed, server["round"], client.id)
        self.sizes = common.batch_sizes(len(client), args, common.has_batch_norm(net))
        self.t, self.draws, self.shapes, self.shape = 0, {}, None, None

    def copy(self):
        return common.cast_blocks(copy.deepcopy(self.template), self.args, self.device)

    def pin(self, name, value):
        if isinstance(value, (list, tuple)):
            return [self.pin(name, v) for v in value]
        return torch.as_tensor(value).detach().clone()

    def frozen(self, name, weights=None):
        net = self.copy().eval().requires_grad_(False)
        net.load_state_dict(self.net.state_dict() if weights is None else weights)
        return net

    def rng(self, name):
        return common.keyed(name, *self.key)

    def draw(self, name, f):
        self.draws[name] = torch.from_numpy(f(self.rng(name), max(1, len(self.sizes))))

    def row(self, name):
        return self.draws[name][self.t]

    def part(self, f, *inputs):
        return common.tree_map(torch.Tensor.detach, f(*inputs))

    batches, map = common.Worker.batches, common.Worker.map


def train(worker, client, server, args, local_update):
    """Train one client for one round. Return its local weights, a state_dict."""
    net, data = worker.net, worker.data
    state = common.optimizer_state(worker.opt)
    for buffer, value in zip(state, client.state.get("momentum", [])):  # of --persist-opt
        buffer.copy_(value)
    method = local_update(worker, client, server, args)
    step = next(method)
    steps, rng = len(worker.sizes), worker.rng("batches")
    tables = common.batch_tables(client.index, steps, args, net, data, rng)
    for t, size in enumerate(worker.sizes):
        worker.t, worker.shape = t, worker.shapes[t] if worker.shapes else None
        draws = {name: torch.from_numpy(table[t, :size]) for name, table in tables.items()}
        index = draws.pop("index")
        x = common.apply_augment(data.x[index], draws)
        step(common.channels_last(data.normalise(x)), data.y[index])
    next(method, None)
    if args.persist_opt:
        client.state["momentum"] = state
    client.state = common.tree_map(lambda t: t.detach().clone(), client.state)
    return net.state_dict()


def run(args, local_update, aggregate=None, after_round=None, adapt=None, data=None, net=None):
    """Train a federation as common.run() does. Return the global network and (round, %, loss)s."""
    args = copy.copy(args)
    args.resume = False  # it begins anew
    common.note_own(args, data, net)
    torch.set_num_threads(common.Pool.plan(args)[1])  # as the engine's: sums depend on it
    data = common.load_data(args) if data is None else common.hold_out(data, args)
    parts = common.partition(data, args)
    net = common.prepare_net(data, args, adapt, net)
    server, states, rows = {}, {}, []  # what the server keeps, and what each client keeps
    for t in range(1, args.rounds + 1):
        server |= {"round": t, "clients": common.sample(args, t)}
        clients = [common.Client(k, parts[k], states.get(k, {})) for k in server["clients"]]
        common.set_weights(clients, args, t)
        received = common.Received()
        for client in clients:
            worker = Worker(net, data, args, client, server)
            weights = train(worker, client, server, args, local_update)
            states[client.id], client.state = client.state, None  # it stays with the client
            received.add(common.Upload(client, weights))
        (aggregate or common.average)(net, received, server, args)
        if after_round:
            worker = Worker(net, data, args, clients[0], server)
            worker.net.eval()
            after_round(worker, clients, server, args)
        rows.append((t, *common.evaluate(net, data, args)))
        if not args.quiet:
            print("round {:3}  accuracy {:5.2f}%  test loss {:.4f}".format(*rows[-1]))
    return net, rows


def main(argv):
    """Run the script that the first word names, on the flags that follow it."""
    with common.one_line_errors("plain"):
        name, script = (argv[0] if argv else "").removesuffix(".py"), None
        if pathlib.Path(__file__).with_name(f"{name}.py").is_file():
            script = importlib.import_module(name)
        if not hasattr(script, "local_update"):
            raise common.UserError("name a method's script first: plain.py fedprox --mu 0.1 ...")
        script.main([*argv[1:], "--device", "cpu"], run=run)


if __name__ == "__main__":
    main(sys.argv[1:])
