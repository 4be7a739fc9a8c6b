"""Convert a stack of one network to a `Chain` (a list of layers, which growth needs), and a grown chain to a stack."""

from itertools import accumulate

from torch import Tensor

from vision.firefly.chain import Chain, Layer, Norm
from vision.networks import MLPStack, Stack, VGGStack
from vision.networks.parameters import Parameters


def chain_from_stack(stack: Stack) -> Chain:
    """Return the only network of a stack as a chain, whose tensors are views of the tensors of the stack.

    Args:
        stack: a stack of M = 1 network.

    Raises:
        TypeError: if Firefly cannot grow this kind of network.
    """
    parameters = stack.parameters
    if isinstance(stack, MLPStack):
        count = len(stack.sizes) - 1
        layers = [
            Layer(parameters[f"weight_{number}"][0], parameters[f"bias_{number}"][0], None)
            for number in range(1, count)
        ]
        return Chain(layers, parameters[f"weight_{count}"][0], parameters[f"bias_{count}"][0])
    if isinstance(stack, VGGStack):
        last_layers_of_blocks = set(accumulate(stack.blocks))
        layers = []
        for number in range(1, len(stack.widths) + 1):
            norm = Norm(
                parameters[f"scale_{number}"][0],
                parameters[f"shift_{number}"][0],
                stack.statistics[f"mean_{number}"][0],
                stack.statistics[f"variance_{number}"][0],
            )
            weight = parameters[f"conv_{number}"][0].permute(0, 3, 1, 2)
            layers.append(Layer(weight, None, norm, number in last_layers_of_blocks))
        return Chain(layers, parameters["weight_head"][0], parameters["bias_head"][0])
    raise TypeError(f"Firefly cannot grow a {type(stack).__name__}, only an MLPStack or a VGGStack")


def stack_from_chain(chain: Chain, like: Stack) -> Stack:
    """Return a stack of one network with copies of the tensors of the chain.

    Args:
        chain: the network.
        like: a stack. The new stack has the same kind, the same number of inputs and the same device.
    """
    if isinstance(like, MLPStack):
        return _mlp_stack(chain, like)
    assert isinstance(like, VGGStack)
    return _vgg_stack(chain, like)


def _mlp_stack(chain: Chain, like: MLPStack) -> MLPStack:
    """Return a stack of one multilayer perceptron with copies of the tensors of the chain.

    Args:
        chain: the network.
        like: a stack. The new stack has the same number of inputs and the same device.
    """
    tensors: dict[str, Tensor] = {}
    pairs = [*((layer.weight, layer.bias) for layer in chain.layers), (chain.head_weight, chain.head_bias)]
    for number, (weight, bias) in enumerate(pairs, start=1):
        assert bias is not None
        tensors |= {f"weight_{number}": weight[None], f"bias_{number}": bias[None]}
    sizes = [like.sizes[0], *chain.widths, len(chain.head_bias)]
    return MLPStack(sizes, Parameters.from_state(tensors, like.parameters.device))


def _vgg_stack(chain: Chain, like: VGGStack) -> VGGStack:
    """Return a stack of one VGG with copies of the tensors of the chain.

    Args:
        chain: the network.
        like: a stack. The new stack has the same number of inputs and the same device.
    """
    tensors: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    blocks = [0]
    for number, layer in enumerate(chain.layers, start=1):
        norm = layer.norm
        assert norm is not None
        tensors |= {
            f"conv_{number}": layer.weight.permute(0, 2, 3, 1)[None],
            f"scale_{number}": norm.scale[None],
            f"shift_{number}": norm.shift[None],
        }
        statistics |= {f"mean_{number}": norm.mean[None], f"variance_{number}": norm.variance[None]}
        # Count the layers of each block. A block ends with a pooled layer. The last layer is pooled, too, so the list
        # ends with the count 0 of a block that does not exist. `blocks[:-1]` below removes this count.
        blocks[-1] += 1
        if layer.is_pooled:
            blocks.append(0)
    tensors |= {"weight_head": chain.head_weight[None], "bias_head": chain.head_bias[None]}
    device = like.parameters.device
    return VGGStack(
        like.num_inputs,
        chain.widths,
        blocks[:-1],
        Parameters.from_state(tensors, device),
        Parameters.from_state(statistics, device),
    )
