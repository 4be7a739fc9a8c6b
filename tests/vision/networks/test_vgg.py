"""The VGG and its mixtures compared with torch's modules, mostly in double precision, so that errors stand out."""

import pytest
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from tests.vision.networks.following import Noise
from tests.vision.networks.vggs import CPU, generators, mixture, vgg
from vision.checkpoints import read_checkpoint, write_checkpoint
from vision.flops import count_flops
from vision.networks import ModuleStack, Structure, narrow
from vision.networks.modules import MixtureLayerModule
from vision.networks.narrow import NarrowBlock
from vision.networks.vgg import ConvBlock
from vision.optimizers import SGD
from vision.seeds import generator
from vision.training import OwnLoss


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["narrow", "torch"], autouse=True)
def backend(request, monkeypatch):
    """Run each test with blocks computed by narrow.c, and by torch."""
    if request.param == "narrow" and narrow.load_or_warn(narrow.SOURCE, "float") is None:
        pytest.skip("narrow.c is not compiled here")
    torch.set_num_threads(1)  # with more threads, narrow.c computes fewer channels
    monkeypatch.setattr("vision.networks.narrow.MAX_CHANNELS", 16 if request.param == "narrow" else 0)
    return request.param


def grown(hard=False, flat=False):
    """Return mixtures that were split twice. Each network split other experts."""
    stack = mixture(num_experts=1, hard=hard)
    stack = stack.split([[0, 0]] * 4, generators(2, "first"), flat)
    return stack.split([[0, 1], [1, 0], [0, 0], [1, 1]], generators(2, "second"), flat)


def images(num_groups, num_examples, seed=0):
    """Return random images for stacks, [G, b, 32, 32, 3], and the same images for modules, [G, b, 3, 32, 32]."""
    x = torch.randn(num_groups, num_examples, 32, 32, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.movedim(-1, 2)


def gradients(stack, number):
    """Return the gradients of one network, in the order of its module's parameters.

    The gradients take the place of the parameters while the stack makes the module.
    """
    original = stack.parameters.flat.clone()
    stack.parameters.flat.copy_(stack.gradient.flat)
    found = [p.detach() for p in stack.to_module(number).parameters()]
    stack.parameters.flat.copy_(original)
    return found


def flat_state(module):
    """Return all parameters and running statistics of a module as one flat tensor."""
    state = module.state_dict()
    return torch.cat([state[name].flatten() for name in sorted(state) if not name.endswith("num_batches_tracked")])


KINDS = {
    "vgg": vgg,
    "one expert": mixture,
    "three experts": lambda: mixture(num_experts=3),
    "grown": grown,
    "grown flat": lambda: grown(flat=True),
    "grown hard": lambda: grown(hard=True),
}


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_autograd(kind, groups, double):
    stack = KINDS[kind]()
    x, torch_x = images(groups, num_examples=6)
    d_logits = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1))
    noise = Noise(2)
    if "hard" in kind:
        stack.set_gate_noise(noise)
    modules = [stack.to_module(number).train() for number in range(2)]
    logits = stack.logits(x, training=True)
    stack.backward(d_logits)
    for number, network in enumerate(modules):
        more = {"uniforms": [uniform[number] for uniform in noise.given]} if "hard" in kind else {}
        expected = network(torch_x[number % groups], **more)
        torch.testing.assert_close(logits[number], expected.detach(), rtol=1e-9, atol=1e-9)
        expected.backward(d_logits[number])
        for ours, p in zip(gradients(stack, number), network.parameters(), strict=True):
            torch.testing.assert_close(ours, p.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("backend", "kind", "nesterov"),
    [
        pytest.param("torch", "vgg", True, marks=pytest.mark.slow),
        ("torch", "grown", False),
        pytest.param("narrow", "vgg", False, marks=pytest.mark.slow),
        ("narrow", "grown", True),
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("num_updates", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_updates_equal_those_torch_x(backend, kind, nesterov, num_updates, double):
    """Parameters and running statistics agree to 1e-9 after every update, and so do predictions at the end."""
    stack = KINDS[kind]()
    recipe = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": nesterov}
    modules = [stack.to_module(number).train() for number in range(2)]
    optimizers = [torch.optim.SGD(network.parameters(), **recipe) for network in modules]
    began, loss, optimizer = stack.parameters.flat.clone(), OwnLoss(2, 1), SGD(stack.parameters.flat, **recipe)
    for update in range(num_updates):
        x, torch_x = images(2, num_examples=5 if update == num_updates - 1 else 8, seed=update)
        y = (x.mean((2, 3, 4)) * 1000).long() % 10
        stack.backward(loss.gradient(stack.logits(x, training=True), F.one_hot(y, 10).double()))
        optimizer.step(stack.gradient.flat)
        for number, network in enumerate(modules):
            optimizers[number].zero_grad()
            F.cross_entropy(network(torch_x[number]), y[number]).backward()
            optimizers[number].step()
        for number, network in enumerate(modules):
            ours, theirs = (flat_state(one) for one in (stack.module(number), network))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=f"network {number}, update {update}")
    assert (stack.parameters.flat - began).abs().max() > 0.01
    x, torch_x = images(1, 7, seed=99)
    predicted = stack.logits(x)
    for number, network in enumerate(modules):
        torch.testing.assert_close(predicted[number], network.eval()(torch_x[0]).detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("hard", [False, True])
def test_a_split_does_not_change_the_logits_of_a_trained_network(hard):
    stack = grown(hard)
    stack.set_gate_noise(Noise(2))
    optimizer = SGD(stack.parameters.flat, 0.05, 0.9)
    for update in range(10):
        x, _ = images(2, 16, seed=update)
        one_hot = F.one_hot(torch.arange(32).view(2, 16) % 10, 10).float()
        stack.backward(OwnLoss(2, 1).gradient(stack.logits(x, training=True), one_hot))
        optimizer.step(stack.gradient.flat)
    x, _ = images(1, 50, seed=77)
    split = stack.split([[2, 0], [1, 1], [0, 2], [2, 2]], generators(2, "third"))
    torch.testing.assert_close(split.logits(x), stack.logits(x), rtol=0, atol=1e-5)
    assert (split.num_experts, stack.num_experts) == (4, 3)
    assert [gates.splits for gates in split.gates] == [
        [[0, 0, 2], [0, 1, 0]], [[0, 1, 1], [0, 0, 1]], [[0, 0, 0], [0, 0, 2]], [[0, 1, 2], [0, 1, 2]],
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_twins_become_different_in_training(backend):
    """A split gives both twins the same weights. Their gates are random, and so their gradients differ."""
    stack = mixture(num_experts=1).split([[0, 0]] * 4, generators(2, "first"))
    optimizer = SGD(stack.parameters.flat, 0.05, 0.9)
    for update in range(3):
        x, _ = images(2, 16, seed=update)
        one_hot = F.one_hot(torch.arange(32).view(2, 16) % 10, 10).float()
        stack.backward(OwnLoss(2, 1).gradient(stack.logits(x, training=True), one_hot))
        optimizer.step(stack.gradient.flat)
    for network in range(2):
        module = stack.to_module(network)
        apart = [
            max(
                float((a - b).abs().max())
                for a, b in zip(*(expert.parameters() for expert in layer.experts), strict=True)
            )
            for layer in module.modules()
            if isinstance(layer, MixtureLayerModule)
        ]
        assert len(apart) == 4
        assert min(apart) > 1e-6, apart


def test_a_flat_split_changes_the_logits():
    stack = mixture(num_experts=2)
    x, _ = images(1, 50)
    jump = (stack.split([[0, 0]] * 4, generators(2, "third"), flat=True).logits(x) - stack.logits(x)).abs().max()
    assert jump > 1e-3
    assert (stack.split([[0, 0]] * 4, generators(2, "third")).logits(x) - stack.logits(x)).abs().max() < 1e-5


@pytest.mark.parametrize("width", [4, 8, 16])
def test_the_number_of_parameters_is_that_of_the_paper(width):
    stack = ModuleStack.initialised(Structure("vgg", (3, 32, 32), 10, width), generators(1), CPU)
    assert stack.num_params == 27 * width + 135 * width**2 + 32 * width + 10 * width + 10
    assert stack.num_params == sum(p.numel() for p in stack.to_module(0).parameters())
    if width == 16:
        assert stack.num_params == 35_674


def test_flops_by_hand():
    stack = ModuleStack.initialised(Structure("vgg", (3, 32, 32), 10, 4), generators(1), CPU)
    sides = [32] * 2 + [16] * 2 + [8] * 4 + [4] * 4 + [2] * 4
    convs = [2 * 9 * num_in * 4 * side**2 for num_in, side in zip([3] + [4] * 15, sides, strict=True)]
    head = 2 * 4 * 10
    assert stack.flops.forward == sum(convs) + head
    # The backward pass costs twice as much, except that the first convolution's input needs no gradient.
    assert stack.flops.training == 3 * (sum(convs) + head) - convs[0]


def test_a_prediction_with_hard_gates_computes_one_expert_per_mixture():
    soft, hard = grown(), grown(hard=True)
    one_expert = mixture(num_experts=1)
    gate_flops = sum(2 * 16 * 4 * gates.num_branches for gates in hard.gates)
    assert hard.flops.prediction == one_expert.flops.forward + gate_flops
    assert soft.flops.prediction == soft.flops.forward == hard.flops.forward
    assert soft.flops == count_flops(soft.to_module(0), (3, 32, 32))


@pytest.mark.parametrize("kind", ["vgg", "grown", "grown hard"])
def test_a_checkpoint_restores_the_stack(kind, tmp_path):
    stack = KINDS[kind]()
    x, _ = images(1, 4)
    if "hard" not in kind:
        stack.logits(x, training=True)  # changes the running statistics
    write_checkpoint(stack, tmp_path / "networks.pt")
    again = read_checkpoint(tmp_path / "networks.pt", CPU)
    assert type(again) is type(stack)
    assert torch.equal(again.logits(x), stack.logits(x))
    assert again.state().keys() == stack.state().keys()


def test_a_network_computes_the_same_in_a_stack_and_alone():
    together, alone = vgg(2), vgg(draw=[generator(1, "initialisation")])
    x, _ = images(2, 8)
    both, one = together.logits(x, training=True), alone.logits(x[1:], training=True)
    assert torch.equal(both[1], one[0])
    together.reset_parameters(generators(2))
    assert torch.equal(together.logits(x), vgg(2).logits(x))  # parameters and statistics are the initial ones


@pytest.mark.parametrize("kind", ["vgg", "grown"])
def test_nan_stays_nan(kind):
    """A network that diverged must show it: NaN must not become 0 anywhere."""
    stack = KINDS[kind]()
    x, _ = images(1, 9)
    for name in stack.parameters.shapes:
        if ".conv_" in name:
            stack.parameters[name].fill_(torch.nan)
            break
    logits = stack.logits(x, training=True)
    assert logits.isnan().all()
    assert stack.logits(x).isnan().all()
    stack.backward(torch.ones_like(logits))
    assert stack.gradient.flat.isnan().any()


def test_the_backend_is_the_selected_one(backend, monkeypatch):
    stack, (x, _), calls = vgg(), images(1, 4), []
    computed = NarrowBlock.forward
    monkeypatch.setattr(NarrowBlock, "forward", staticmethod(lambda *args: calls.append(1) or computed(*args)))
    stack.logits(x, training=True)
    assert len(calls) == (10 if backend == "narrow" else 0)  # five blocks of two networks


@pytest.mark.parametrize("backend", ["narrow"], indirect=True)
def test_wrong_shapes_are_refused(backend):
    """Before C code reads or writes memory, because it checks nothing."""
    block = ConvBlock([3, 4]).train()
    (norm,), parameters = block._norms_and_parameters()
    running = [block._running(norm)]
    for wrong in (torch.zeros(4, 32, 32, 2), torch.zeros(4, 7, 7, 3), torch.zeros(4, 8, 6, 3)):
        with pytest.raises(ValueError, match="do not fit"):
            NarrowBlock.apply(wrong, running, True, *parameters)
    with pytest.raises(TypeError, match="needs a contiguous"):
        NarrowBlock.apply(torch.zeros(4, 32, 32, 3).double(), running, True, *parameters)
    # Odd images and images that are not square are computed by torch.
    assert block(torch.zeros(4, 3, 7, 7)).shape == (4, 4, 3, 3)
    assert block(torch.zeros(4, 3, 8, 6)).shape == (4, 4, 4, 3)


def test_both_backends_agree():
    """In single precision, with unequal widths and batches that do not fill the last vector."""
    for num_examples, widths in ((1, (1, 2, 3, 4, 5, 6)), (19, (5, 9, 16, 7, 4, 8)), (128, (4,) * 6)):
        stacks = [vgg(1, widths) for _ in range(2)]
        x, _ = images(1, num_examples)
        d_logits, results = torch.randn(1, num_examples, 10, generator=torch.Generator().manual_seed(1)), []
        for stack, limit in zip(stacks, (16, 0), strict=True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("vision.networks.narrow.MAX_CHANNELS", limit)
                results.append((stack.logits(x, training=True), stack.logits(x)))
                stack.backward(d_logits)
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stacks[0].statistics.flat, stacks[1].statistics.flat, rtol=1e-5, atol=1e-5)
        apart = (stacks[0].gradient.flat - stacks[1].gradient.flat).norm()
        assert 0 < apart < 1e-4 * stacks[1].gradient.flat.norm()


@pytest.mark.parametrize("kind", ["vgg", "grown"])
def test_bfloat16_follows_float32_as_well_as_autocast_does(kind):
    """The gradient of so small a network has an error of a fifth of its norm, as with torch's own autocast."""
    single, half = KINDS[kind](), KINDS[kind]()
    half.set_compute_dtype(torch.bfloat16)
    x, torch_x = images(2, 16)
    y = torch.arange(32).view(2, 16) % 10
    logits = []
    for stack in (single, half):
        logits.append(stack.logits(x, training=True))
        stack.backward(OwnLoss(2, 1).gradient(logits[-1], F.one_hot(y, 10).float()))
        assert {stack.gradient.flat.dtype, stack.statistics.flat.dtype, logits[-1].dtype} == {torch.float32}
    assert not torch.equal(*logits)
    assert (logits[0] - logits[1]).std() < 0.1 * logits[0].std()
    torch.testing.assert_close(half.statistics.flat, single.statistics.flat, rtol=0.02, atol=0.01)
    ours = theirs = 0.0
    for number in range(2):
        module = KINDS[kind]().to_module(number).train()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(torch_x[number])
        F.cross_entropy(out.float(), y[number]).backward()
        for exact, rounded, p in zip(
            gradients(single, number), gradients(half, number), module.parameters(), strict=True
        ):
            ours += float((rounded - exact).square().sum())
            theirs += float((p.grad - exact).square().sum())
    assert 0 < ours < 1.5 * theirs
    assert theirs**0.5 < 0.5 * single.gradient.flat.norm()


@pytest.mark.parametrize("make", [lambda: vgg(2), lambda: mixture(num_experts=2, hard=False)], ids=["vgg", "mixture"])
def test_statistics_are_computed_again_as_torch_does(double, make):
    """They are means over the batches and do not depend on the old statistics. Later training is not affected."""
    stack, batches = make(), [images(2, size, seed) for seed, size in enumerate((6, 9, 5, 4))]
    modules = [stack.to_module(number) for number in range(2)]
    stack.statistics.flat.fill_(torch.nan)
    assert stack.recompute_statistics(x for x, _ in batches[:3]) == 6 + 9 + 5
    for number, module in enumerate(modules):
        update_bn([x_of_module[number] for _, x_of_module in batches[:3]], module)
    for is_trained in (False, True):
        if is_trained:
            stack.logits(batches[3][0], training=True)
            for number, module in enumerate(modules):
                module.train()(batches[3][1][number])
        for number, module in enumerate(modules):
            found = dict(stack.to_module(number).named_buffers())
            for name, expected in module.named_buffers():
                torch.testing.assert_close(found[name], expected, check_dtype=False)
