"""SGD with momentum (Sutskever et al. 2013), in the order of operations of torch/optim/sgd.py.

Operations round where those of torch's default do, which adds with one fma (``torch.add`` with ``alpha``).
"""

from ..formats.choice import Moment
from .moments import decayed
from .rule import fma, rule


@rule
def sgd(param, grad, *, lr, weight_decay=0.0, maximize=False):
    """SGD without momentum; it has no state."""
    grad = -grad if maximize else grad
    grad = decayed(grad, param, weight_decay)
    param = fma(-lr, grad, param)
    return param


@rule(moments={"momentum_buffer": Moment(decay="momentum")})
def sgd_momentum(
    param, grad, momentum_buffer, *, lr, momentum, step, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False
):
    """Momentum update number ``step``, counted from 1.  As in torch, the first stores the undamped gradient."""
    grad = -grad if maximize else grad
    grad = decayed(grad, param, weight_decay)
    momentum_buffer = grad if step == 1 else fma(1 - dampening, grad, momentum * momentum_buffer)
    update = fma(momentum, momentum_buffer, grad) if nesterov else momentum_buffer
    param = fma(-lr, update, param)
    return param, momentum_buffer
