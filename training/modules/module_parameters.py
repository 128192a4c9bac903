"""Learning rates and gradient norms by module, where Trainer has one of each for the whole model."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.modules.stages import ModuleGroup


# PEFT and FSDP's activation checkpointing put these parts into the names of the parameters that they wrap.
WRAPPER_NAME_PARTS = ("base_model.model.", "_checkpoint_wrapped_module.")


class TrainedModules:
    """The names and learning rates of the modules that a run trains, and the names of their parameters.

    Parameters themselves are not kept: FSDP2 replaces them by shards, and a reference to a whole parameter would keep
    it on the device.

    Args:
        groups: The modules of the model with their learning rates, as `prepare_stage` returns them.
    """

    def __init__(self, groups: list[ModuleGroup]) -> None:
        self._module_names: dict[str, str] = {}  # by the parameter's name
        self._rates: dict[str, float] = {}  # by the module's name
        for group in groups:
            for parameter_name in group.parameters:
                self._module_names[parameter_name] = group.name
            if group.learning_rate is not None:
                self._rates[group.name] = group.learning_rate

    def list_parameters(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """The trained parameters of each module, or this process's shards of them."""
        parameters: dict[str, list[nn.Parameter]] = {module: [] for module in self._rates}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for part in WRAPPER_NAME_PARTS:
                    name = name.replace(part, "")
                module = self._module_names[name]
                parameters[module].append(parameter)
        return parameters

    def set_rates(self, optimizer: torch.optim.Optimizer, model: nn.Module, common_rate: float) -> None:
        """Divide the groups of an optimizer, one with weight decay and one without, by module.

        Args:
            optimizer: The optimizer of the model's trained parameters.
            model: The model.
            common_rate: The run's learning rate.
        """
        # Trainer logs the rate of the first group as `learning_rate`. So modules with the common rate come first. The
        # others follow, the highest rate first.
        highest_first = sorted(self._rates, key=lambda module: self._rates[module], reverse=True)
        with_common_rate = [module for module in highest_first if self._rates[module] == common_rate]
        with_own_rate = [module for module in highest_first if self._rates[module] != common_rate]

        trained_parameters = self.list_parameters(model)
        module_groups = []
        for module in with_common_rate + with_own_rate:
            members = set(trained_parameters[module])
            for group in optimizer.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter in members]
                if parameters:
                    changes = {"params": parameters, "lr": self._rates[module], "module": module}
                    module_groups.append({**group, **changes})
        optimizer.param_groups = module_groups


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """L2 norm of the gradient of all `parameters` together, a scalar. Shards of other processes are included."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        return norm.full_tensor()
    return norm
