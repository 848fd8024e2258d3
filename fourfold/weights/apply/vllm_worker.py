"""Runs weight updates inside vLLM's worker processes. The only module of the package that imports vLLM.

vLLM mixes `WeightWorker` into its worker class (`worker_extension_cls`), and the service calls its methods with
`collective_rpc`. A worker does nothing else during a call, so every wait in here has a deadline of its own. The methods
take and return plain values and never raise: see `fourfold.weights.worker_control`.

vLLM's core waits for a `collective_rpc` in the thread that schedules, so the engine samples nothing until all workers
have replied. So `weights_open` needs no pause: the engine stands still until it returns. It waits for the senders, with
NCCL also for all receivers.

This works with vLLM 0.26 to 0.32, whose layerwise reload has the same names.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.model_loader import base_loader, get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    LOADING_LAYERS,
    _get_original_loader,
    _place_kernel_tensors,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from fourfold.address import LOOPBACK
from fourfold.errors import FourfoldError, Internal, WrongState
from fourfold.host.process_tree import die_with, die_with_parent, parent_of
from fourfold.weights.apply.adapter import POLICY_ADAPTER, AdapterApplier, folder_samples
from fourfold.weights.apply.direct import DirectApplier
from fourfold.weights.apply.loader_trace import CopyRecorder, LoaderTrace, NamedTensors, load_refused
from fourfold.weights.apply.proof import Proof, kept_tensors, prove, tensor_sums
from fourfold.weights.apply.reload import ReloadApplier
from fourfold.weights.base_fingerprint import fingerprint
from fourfold.weights.consensus import GroupConsensus
from fourfold.weights.manifest import AdapterSpec
from fourfold.weights.receiver import WeightReceiver
from fourfold.weights.source.base import synchronize
from fourfold.weights.source.fused_params import storage_id
from fourfold.weights.transport.base import available_backends
from fourfold.weights.worker_control import error_reply, not_proven

_log = logging.getLogger(__name__)
_ENGINE_PROCESS: Final = "EngineCore"
# Quantisation methods whose layers compute with the weights as they were loaded.
_AS_LOADED: Final = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
# Attributes of layers with tensors computed from the weights (multi-head latent attention).
_DERIVED: Final = ("W_UV", "W_UK_T", "W_UK", "W_UV_T")
# Models that need no proof on GPUs, which takes as long as loading: tests/gpu/test_model_updates.py compares updated
# engines with fresh ones.
_VERIFIED_ON_GPUS: Final = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
_VERIFIED_EXPERTS: Final = frozenset(
    {"MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"}
)
# vLLM's name for weights that it quantises to fp8 itself. Kernels of experts keep scales of their own.
_ONLINE_FP8: Final = "fp8_per_tensor"
# Functions of a layer that use a copy of its weight which is in no tensor (oneDNN).
_PACKED: Final = ("cpu_linear",)


def _die_with_service() -> None:
    """Make the engine's processes die with the service, even if it is killed.

    service -> worker                  in-process engine core: the worker is vLLM's core process, or a child
    service -> EngineCore -> worker    the core does not import this module, so the worker kills it too
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return  # the worker runs in the service's own process
    die_with_parent(parent.pid)
    if parent.name.startswith(_ENGINE_PROCESS):
        service = parent_of(parent.pid)
        if service > 1:
            die_with(service, parent.pid)


_die_with_service()


def _record_loads() -> None:
    """Make vLLM note, for each model that it loads, the tensors that it computes from the weights; see `proof`.

    These are the tensors beside the parameters that the model got, or that changed, between its construction and the
    end of its load. Later ones, such as KV caches, have nothing to do with weights.
    """
    loader: Any = base_loader  # untyped: the module does not export the names that it calls
    construct, process = loader.initialize_model, loader.process_weights_after_loading

    @functools.wraps(construct)
    def initialize_model(vllm_config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = construct(vllm_config, *args, **kwargs)
        if vllm_config.lora_config is not None or is_verified(vllm_config, current_platform.device_type):
            return model
        vars(model)[_CONSTRUCTED] = {name: tensor_sums(tensor) for name, tensor in kept_tensors(model).items()}
        return model

    @functools.wraps(process)
    def process_weights_after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        process(model, *args, **kwargs)
        before: Mapping[str, object] | None = vars(model).pop(_CONSTRUCTED, None)
        if before is None:
            return
        kept = kept_tensors(model)
        vars(model)[_LOADED] = {name: before.get(name) != tensor_sums(tensor) for name, tensor in kept.items()}

    loader.initialize_model = initialize_model
    loader.process_weights_after_loading = process_weights_after_loading


_CONSTRUCTED: Final = "_fourfold_constructed"
_LOADED: Final = "_fourfold_loaded"
_record_loads()


def is_verified(vllm_config: Any, device_type: str) -> bool:
    """Return whether tests replace the proof for a model on this type of device."""
    model_config = vllm_config.model_config
    names = set(getattr(model_config.hf_config, "architectures", None) or ())
    stored = getattr(model_config.hf_config, "quantization_config", None)
    if device_type != "cuda" or not names or stored is not None or model_config.model_impl not in ("auto", "vllm"):
        return False
    if model_config.quantization is None:
        return names <= _VERIFIED_ON_GPUS | _VERIFIED_EXPERTS
    return model_config.quantization == _ONLINE_FP8 and names <= _VERIFIED_ON_GPUS


def _loaded_state(model: torch.nn.Module) -> Mapping[str, bool]:
    """Return the names of the tensors that a model had when it was loaded, and whether each depends on the weights."""
    state: Mapping[str, bool] | None = vars(model).get(_LOADED)
    if state is None:
        raise WrongState("vLLM loaded the model in a way that Fourfold does not know")
    return state


def _removed(*_: Any) -> Any:
    raise RuntimeError("a weight update did not pack this layer's weight anew")


class VllmModel:
    """A worker's loaded model: implements `ReloadableModel`, `DirectModel` and `ProvableModel`."""

    def __init__(self, worker: Any) -> None:
        self._config = worker.vllm_config
        self._device: torch.device = worker.device
        self._model: torch.nn.Module = worker.get_model()
        self._one_stage = self._config.parallel_config.pipeline_parallel_size == 1
        self._tensor_parallel = self._config.parallel_config.tensor_parallel_size
        self._is_first = worker.rank % self._tensor_parallel == 0
        self._tied = _tied_groups(self._model)
        self._expert_kernels: list[tuple[Any, Any]] = []
        """During a load on a CPU: (quantisation method, its kernel) of all experts, see `_remove_expert_kernels`."""

    def checkpoint(self) -> NamedTensors:
        settings = self._config.load_config
        loader: Any = get_model_loader(settings)
        if not hasattr(loader, "get_all_weights"):
            raise WrongState(f"vLLM's load format {settings.load_format} does not read the tensors of a model folder")
        yield from loader.get_all_weights(self._config.model_config, self._model)

    def needs_no_proof(self) -> bool:
        """Return whether tests cover the model, or its weights are vLLM's dummy weights, as in benchmarks."""
        return is_verified(self._config, self._device.type) or self._config.load_config.load_format == "dummy"

    def sent_dtype(self) -> str:
        return str(self._config.model_config.dtype).removeprefix("torch.")

    def tied(self) -> list[list[str]]:
        return [[f"{path}.{name}" for path, _, name in group] for group in self._tied]

    def state(self) -> dict[str, torch.Tensor]:
        kept = kept_tensors(self._model)
        loaded = _loaded_state(self._model)
        return self._parameters() | {name: kept[name] for name in loaded if name in kept}

    def weight_state(self) -> set[str]:
        return self._parameters().keys() | {name for name, computed in _loaded_state(self._model).items() if computed}

    def addresses_matter(self) -> bool:
        return self._device.type == "cuda" and not self._config.model_config.enforce_eager

    def remove_packed(self) -> Callable[[], list[str]]:
        removed = [
            (f"{path}.{name}", layer, name)
            for path, layer in self._model.named_modules()
            for name in _PACKED
            if name in vars(layer)
        ]
        for _, layer, name in removed:
            setattr(layer, name, _removed)
        return lambda: [path for path, layer, name in removed if getattr(layer, name) is _removed]

    def _parameters(self) -> dict[str, torch.Tensor]:
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: parameter.data for name, parameter in named}

    def trace(self, tensors: NamedTensors) -> LoaderTrace:
        """Run the model's loader on meta tensors and record its copies; takes milliseconds."""
        sources = list(tensors)
        destinations: list[tuple[str, torch.Tensor]] = []
        try:
            self.begin_load()
            for path, layer in self._model.named_modules():
                for name, tensor in get_layer_tensors(layer).items():
                    tensor.weight_loader = _get_original_loader(tensor)  # type: ignore[attr-defined]
                    if name in layer._parameters:
                        destinations.append((f"{path}.{name}", tensor))
            forms = {name: _form(tensor) for name, tensor in destinations}
            recorder = CopyRecorder(sources, destinations)
            handed_out: list[str] = []
            try:
                with recorder, set_current_vllm_config(self._config):
                    self._model.load_weights(_recording(sources, handed_out))  # type: ignore[operator]
            except (AssertionError, KeyError, ValueError, RuntimeError, IndexError) as error:
                raise load_refused(handed_out[-1] if handed_out else "the manifest", error) from None
        finally:
            self.cancel_load()
        missing = {
            name: (recorder.written[name], tensor.numel())
            for name, tensor in destinations
            if recorder.written[name] != tensor.numel()
        }
        for group in self._tied:
            names = {f"{path}.{name}" for path, _, name in group}
            if names - missing.keys():  # filling one of the tied parameters fills all
                missing = {name: counts for name, counts in missing.items() if name not in names}
        unread = tuple(name for name, _ in sources if not recorder.read[name])
        # vLLM's loaders silently cut their part out of a larger tensor. The first worker has the largest share of each,
        # so all shares together are at most tensor_parallel times its own.
        cut = {
            name: (recorder.read[name] * self._tensor_parallel, tensor.numel())
            for name, tensor in sources
            if self._is_first and 0 < recorder.read[name] * self._tensor_parallel < tensor.numel()
        }
        return LoaderTrace(
            unused=unread if self._one_stage else (),
            elsewhere=() if self._one_stage else unread,
            missing=missing,
            cut=cut,
            regions=tuple(recorder.copies),
            irregular=recorder.irregular or self._changed(forms),
        )

    @property
    def device(self) -> torch.device:
        return self._device

    def parameter(self, name: str) -> torch.Tensor:
        return self._model.get_parameter(name)

    def obstacle(self) -> str:
        if self._device.type != "cuda":
            return "on a CPU vLLM packs the weights when it loads them"
        if self._config.model_config.quantization is not None:
            return f"the weights are quantised by {self._config.model_config.quantization} when they are loaded"
        for path, layer in self._model.named_modules():
            method = getattr(layer, "quant_method", None)
            if method is not None and type(method).__name__ not in _AS_LOADED:
                return f"{path} prepares its weights for its kernels ({type(method).__name__})"
            if any(hasattr(layer, name) for name in _DERIVED):
                return f"{path} keeps matrices that are computed from its weights"
        return ""

    def _changed(self, forms: Mapping[str, str]) -> str:
        """Describe a parameter that the running model stores in another form than its loader; empty: there is none."""
        for name, form in forms.items():
            if (now := _form(self.parameter(name))) != form:
                return f"{name} is loaded as {form} and kept as {now}"
        return ""

    def begin_load(self) -> None:
        """Move every layer to meta; vLLM loads each as soon as its tensors are complete."""
        initialize_layerwise_reload(self._model)
        if self._device.type == "cpu":
            self._expert_kernels = _remove_expert_kernels(self._model)

    def load(self, tensors: NamedTensors) -> None:
        with set_current_vllm_config(self._config):
            self._model.load_weights(iter(tensors))  # type: ignore[operator]

    def finish_load(self) -> None:
        """Put the kernels' tensors back, now with new values, and repack tied layers."""
        borrowers = [layer for group in self._tied for _, layer, _ in group if _got_no_weights(layer)]
        for layer in borrowers:
            _restore(layer)  # it shares the tensor of the layer that it is tied to
        with set_current_vllm_config(self._config):
            finalize_layerwise_reload(self._model, self._config.model_config)  # type: ignore[no-untyped-call]
            _repack(borrowers)
        self._restore_expert_kernels()
        synchronize(self._device)  # from now on the sender may overwrite the memory that was loaded from

    def cancel_load(self) -> None:
        """Put the kernels' tensors back as they are; vLLM has no call that cancels a reload."""
        for layer in self._model.modules():
            _restore(layer)
        self._restore_expert_kernels()
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload
        LOADING_LAYERS.clear()

    def _restore_expert_kernels(self) -> None:
        """Give experts that were not loaded their kernels back."""
        for method, kernel in self._expert_kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._expert_kernels = []


class VllmAdapters:
    """The LoRA adapters of a worker's model, which was started with `enable_lora`: implements `AdapterModel`."""

    def __init__(self, worker: Any) -> None:
        self._config, self._device = worker.vllm_config, worker.device
        self._manager: Any = worker.model_runner.lora_manager._adapter_manager
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is not None:  # without the rules that join layers; the second name is that of vLLM 0.26
            get = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
            mapper = get()
        self._mapper = mapper
        parts = [name for names in self._manager.packed_modules.values() for name in names]
        self._places = {*self._manager.modules, *parts}
        if self._device.type == "cpu":
            _use_matrix_products()

    @functools.cached_property
    def _base(self) -> tuple[str, dict[str, tuple[int, ...]]]:
        model = self._config.model_config
        tied = bool(getattr(model.hf_config.get_text_config(), "tie_word_embeddings", False))
        samples = folder_samples(Path(model.model), tied=tied)
        return fingerprint(samples), {name: shape for name, (shape, _) in samples.items()}

    @property
    def max_rank(self) -> int:
        return int(self._config.lora_config.max_lora_rank)

    @property
    def base(self) -> str:
        return self._base[0]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._base[1]

    def takes(self, layer: str) -> bool:
        name, _ = parse_fine_tuned_lora_name(f"base_model.model.{layer}.lora_A.weight", self._mapper)
        return name in self._places

    def serve_base(self, number: int) -> None:
        """Register vLLM's adapter of zeros, so that requests may name the adapter before the first update.

        Call it after vLLM's warm-up, which removes all adapters.
        """
        self._replace(self._manager.create_dummy_lora(number, 1, {}))

    def prepare(self, number: int, adapter: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        helper = PEFTHelper(r=adapter.rank, lora_alpha=1, target_modules=[])
        helper.vllm_lora_scaling_factor = adapter.scale
        lora = LoRAModel.from_lora_tensors(
            number,
            dict(tensors),
            helper,
            device="cpu",
            dtype=self._config.lora_config.lora_dtype,
            weights_mapper=self._mapper,
        )
        return lambda: self._replace(lora)

    def _replace(self, lora: LoRAModel) -> None:
        """Register and activate: values written only into vLLM's slot are lost when it is filled again."""
        with torch.inference_mode():
            self._manager.remove_adapter(lora.id)
            self._manager.add_adapter(lora)
            self._manager.activate_adapter(lora.id)
        synchronize(self._device)


def _use_matrix_products() -> None:
    """Make vLLM compute a single adapter on a CPU by matrix products.

    Its own code copies A and B once for each token of a batch. A request without an adapter gets the last slot there,
    so with one slot the results are the same.
    """
    shrink, expand = PunicaWrapperCPU._apply_shrink, PunicaWrapperCPU._apply_expand
    if hasattr(shrink, "__wrapped__"):
        return

    @functools.wraps(shrink)
    def apply_shrink(self: Any, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, scale: float) -> None:
        if len(weights) != 1:
            shrink(self, y, x, weights, scale)
        elif not self.no_lora:
            y.view(-1, y.shape[-1]).copy_(_product(x, weights, y.dtype) * scale)

    @functools.wraps(expand)
    def apply_expand(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        if len(weights) != 1:
            expand(self, y, x, weights, y_offset, y_slice_size, add_inputs)
        elif not self.no_lora:
            part, product = y[:, y_offset : y_offset + y_slice_size], _product(x, weights, y.dtype)
            part.copy_(part + product if add_inputs else product)

    untyped: Any = PunicaWrapperCPU
    untyped._apply_shrink, untyped._apply_expand = apply_shrink, apply_expand


def _product(x: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x W^T in `dtype`, [tokens, out], for x [tokens, in] and weights [1, 1, out, in]."""
    return torch.nn.functional.linear(x.to(dtype), weights.reshape(weights.shape[-2:]).to(dtype))


class WeightWorker:
    """The methods that the service calls in every worker. Mixed into vLLM's worker, so it has no __init__."""

    _fourfold_receiver: WeightReceiver | None = None
    _fourfold_proof: Proof | None = None
    _fourfold_adapters: VllmAdapters | None = None

    def weights_describe(self) -> Any:
        """Return device_type ("cpu" or "cuda"), device_uuids (16 bytes each, none on CPU) and backends.

        With `enable_lora`, requests may name adapter `POLICY_ADAPTER` from now on.
        """
        return _reply(self._fourfold_describe)

    def weights_prove(self) -> Any:
        """Prove, once, that updates replace all weights; the engine must be idle, and hold what it has loaded.

        Return {"refusal": why updates are refused, or empty; "intact": whether the engine may still run}, or an error.
        """

        def run() -> dict[str, Any]:
            if self._fourfold_proof is None:
                self._fourfold_proof = Proof(refusal="the proof failed; see the engine's log", intact=False)
                adapters = self._fourfold_serve_adapters()
                self._fourfold_proof = _prove(VllmModel(self)) if adapters is None else _prove_adapters(adapters)
            return {"refusal": self._fourfold_proof.refusal, "intact": self._fourfold_proof.intact}

        return _reply(run)

    def weights_open(
        self,
        epoch: int,
        backend: str,
        manifest: bytes,
        offers: list[bytes],
        receiver_count: int,
        first_receiver_index: int,
        timeout: float,
        abort_path: str = "",
        host: str = LOOPBACK,
        interface: str = "",
    ) -> Any:
        """Join an epoch; return {"direct": tensors written in place, "reload": reloaded, "reason": why}, or an error.

        The arguments are those of `WeightReceiver.open`, but for the index of this engine's first worker.
        """

        def run() -> dict[str, Any]:
            index = first_receiver_index + int(self.rank)  # type: ignore[attr-defined]
            report = self._fourfold_weights().open(
                epoch, backend, manifest, offers, receiver_count, index, timeout, abort_path, host, interface
            )
            return {
                "direct": report.direct_tensor_count,
                "reload": report.reload_tensor_count,
                "reason": report.reload_reason,
            }

        return _reply(run)

    def weights_receive(self, epoch: int, policy_version: int, timeout: float, skip_sums: bool = False) -> Any:
        """Receive and load a version; return its digest (32 bytes), or an error. The engine must be paused."""
        return _reply(lambda: self._fourfold_weights().receive(epoch, policy_version, timeout, skip_sums))

    def weights_feed(
        self, epoch: int, policy_version: int, receiver_count: int, host: str, interface: str, timeout: float
    ) -> Any:
        """Begin to send the served version to late engines; return the offers (none but in worker 0), or an error."""

        def run() -> list[bytes]:
            if int(self.rank):  # type: ignore[attr-defined]
                return []  # one worker is enough, because each holds all tensors
            return self._fourfold_weights().feed(epoch, policy_version, receiver_count, host, interface, timeout)

        return _reply(run)

    def weights_sums(self, epoch: int) -> Any:
        """Return the per-tensor sums of the version received last (see `fourfold.weights.digest`), or an error."""
        return _reply(lambda: self._fourfold_weights().sums(epoch))

    def weights_commit(self, epoch: int, policy_version: int) -> Any:
        """Record that the received version is served (services with hold: at the release); return None, or an error."""
        return _reply(lambda: self._fourfold_weights().commit(epoch, policy_version))

    def weights_abort(self, epoch: int) -> Any:
        """Close the epoch; return "clean" (the served weights are whole) or "dirty", or an error."""
        if self._fourfold_receiver is None:  # nothing was received
            return "clean" if self._fourfold_proof is None or self._fourfold_proof.intact else "dirty"
        return _reply(lambda: self._fourfold_weights().abort(epoch))

    def _fourfold_weights(self) -> WeightReceiver:
        if self._fourfold_receiver is None:
            proof = self._fourfold_proof or Proof(refusal="the engine was not proven at its start")
            if proof.refusal:
                raise not_proven(proof.refusal)
            device: torch.device = self.device  # type: ignore[attr-defined]
            self._fourfold_receiver = WeightReceiver(proof.appliers, device, _consensus())
        return self._fourfold_receiver

    def _fourfold_serve_adapters(self) -> VllmAdapters | None:
        """Serve the base as an adapter, once; None if the engine was started for whole weights."""
        if self._fourfold_adapters is None and self.vllm_config.lora_config is not None:  # type: ignore[attr-defined]
            self._fourfold_adapters = VllmAdapters(self)
            self._fourfold_adapters.serve_base(POLICY_ADAPTER)
        return self._fourfold_adapters

    def _fourfold_describe(self) -> dict[str, Any]:
        self._fourfold_serve_adapters()
        device: torch.device = self.device  # type: ignore[attr-defined]
        gpus = [device] if device.type == "cuda" else []
        return {
            "device_type": device.type,
            "device_uuids": [torch.cuda.get_device_properties(gpu).uuid.bytes for gpu in gpus],  # type: ignore[attr-defined]
            "backends": available_backends(device),
        }


def _reply(run: Callable[[], Any]) -> Any:
    """Return the result of `run`, or its error as a reply. The request boundary of the worker process."""
    try:
        return run()
    except FourfoldError as error:
        return error_reply(error)
    except Exception:
        _log.exception("Weight update failed in the engine")
        return error_reply(Internal("a weight update failed in the engine; its log has the traceback"))


def _prove(model: VllmModel) -> Proof:
    appliers = (DirectApplier(model), ReloadApplier(model))
    if model.needs_no_proof():
        return Proof(appliers=appliers)
    return prove(model, appliers)


def _prove_adapters(adapters: VllmAdapters) -> Proof:
    """Return the applier of adapters. It needs no proof, because no update changes the weights; read these now."""
    try:
        _log.info("Base weights read. fingerprint=%s", adapters.base)
    except FourfoldError as error:
        return Proof(refusal=error.message)
    return Proof(appliers=(AdapterApplier(adapters),))


def _form(tensor: torch.Tensor) -> str:
    """Describe the properties that decide the place of an element."""
    return f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}"


def _consensus() -> GroupConsensus | None:
    world = get_world_group()
    return GroupConsensus(world.cpu_group, world.rank_in_group, world.world_size) if world.world_size > 1 else None


def _recording(tensors: NamedTensors, handed_out: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors and record each name, so that the last one is the tensor on which a loader failed."""
    for name, tensor in tensors:
        handed_out.append(f"{name} {tuple(tensor.shape)}")
        yield name, tensor


def _tied_groups(model: torch.nn.Module) -> list[list[tuple[str, torch.nn.Module, str]]]:
    """Return the parameters that several layers share, each as the (path, layer, name) of its owners."""
    owners: dict[int, list[tuple[str, torch.nn.Module, str]]] = {}
    for path, layer in model.named_modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.numel():
                owners.setdefault(storage_id(parameter), []).append((path, layer, name))
    return [group for group in owners.values() if len(group) > 1]


def _got_no_weights(layer: torch.nn.Module) -> bool:
    """Return whether a layer was prepared for loading and got no tensor."""
    info = LAYERWISE_INFO.get(layer)
    return info is not None and info.can_load() and info.load_numel == 0


def _restore(layer: torch.nn.Module) -> None:
    """Put a layer's kernel tensors back, unless its load is complete and did so."""
    info = LAYERWISE_INFO.get(layer)
    if info is not None and info.can_load():
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()  # type: ignore[no-untyped-call]


def _repack(layers: list[torch.nn.Module]) -> None:
    """On a CPU, repack weights that arrived through a tied layer.

    vLLM packs the weight of a linear layer when it loads that layer. A head that is tied to the embedding gets no
    weights of its own, so its packed copy would keep the old values, without an error.
    """
    for layer in layers:
        if hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]


def _remove_expert_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Remove the kernels of all experts, and return (quantisation method, kernel) of each.

    On a CPU vLLM packs the weights of experts once, when it makes their kernel. If the kernel existed, a reload would
    replace packed weights by unpacked ones of the same shape, without an error.
    """
    methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels
