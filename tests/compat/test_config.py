"""The documented configuration: keys, defaults, rules; and every row of the page's table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from everstep.compat.smdistributed.modelparallel.config import VARIABLE, ModelParallelConfig, ModelParallelConfigError

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sagemaker-model-parallel.md"
ROWS = re.findall(r"^\| `(\w+)` \| (supported|refused) \|", PAGE.read_text(), re.MULTILINE)

#: A value of each key that is not its default.
OTHER: dict[str, Any] = {
    "pipeline_parallel_degree": 4,
    "microbatches": 8,
    "pipeline": "simple",
    "optimize": "speed",
    "memory_weight": 0.5,
    "placement_strategy": "spread",
    "auto_partition": False,
    "default_partition": 1,
    "ddp": True,
    "ddp_port": 1234,
    "ddp_dist_backend": "gloo",
    "active_microbatches": 3,
    "deterministic_server": True,
    "offload_activations": True,
    "activation_loading_horizon": 2,
    "fp16": True,
    "fp16_params": True,
    "bf16": True,
    "prescaled_batch": True,
    "skip_tracing": True,
    "delayed_parameter_initialization": True,
    "static_mode": True,
    "fast_mode": True,
    "tensor_parallel_degree": 2,
    "shard_optimizer_state": True,
    "sharded_data_parallel_degree": 2,
    "sdp_reduce_bucket_size": 10,
    "sdp_param_persistence_threshold": 10,
    "sdp_max_live_parameters": 10,
    "sdp_hierarchical_allgather": False,
    "sdp_gradient_clipping": 2.0,
    "load_partition": True,
    "partition_file": "partition",
    "horovod": True,
    "contiguous": True,
}

#: What a key needs beside it.
NEEDS = {"pipeline_parallel_degree": 4, "microbatches": 8, "default_partition": 1, "ddp": True}


def test_the_table_has_every_key() -> None:
    assert {key for key, _ in ROWS} == OTHER.keys()


@pytest.mark.parametrize(("key", "told"), ROWS)
def test_a_key_is_read_or_refused_as_the_table_says(key: str, told: str) -> None:
    given = {**NEEDS, key: OTHER[key]}
    if told == "supported":
        assert getattr(ModelParallelConfig.read(given), key) == OTHER[key]
    else:
        with pytest.raises(ModelParallelConfigError, match=key):
            ModelParallelConfig.read(given)


def test_defaults_are_the_documented_ones() -> None:
    config = ModelParallelConfig.read({"pipeline_parallel_degree": 2})
    assert (config.microbatches, config.pipeline, config.optimize) == (1, "interleaved", "memory")
    assert (config.auto_partition, config.ddp, config.placement) == (True, False, "DPT")
    assert (config.weight, config.active, config.activation_loading_horizon) == (0.8, 4, 4)
    assert ModelParallelConfig.read({"optimize": "speed"}).weight == 0.2
    assert ModelParallelConfig.read({"placement_strategy": "spread"}).placement == "TPD"
    assert ModelParallelConfig.read({"placement_strategy": "PDT"}).placement == "PDT"


def test_the_older_name_of_the_degree_is_understood() -> None:
    assert ModelParallelConfig.read({"partitions": 4}).pipeline_parallel_degree == 4
    with pytest.raises(ModelParallelConfigError, match="partitions is the older name"):
        ModelParallelConfig.read({"partitions": 4, "pipeline_parallel_degree": 4})


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"partitions": 2, "microbatches": 4}))
    assert ModelParallelConfig.read().microbatches == 4
    monkeypatch.setenv(VARIABLE, "{")
    with pytest.raises(ModelParallelConfigError, match=f"{VARIABLE} is not JSON"):
        ModelParallelConfig.read()


def test_neutral_values_of_refused_keys_are_no_reason_to_refuse() -> None:
    neutral = {
        "tensor_parallel_degree": 1,
        "sharded_data_parallel_degree": 1,
        "horovod": False,
        "load_partition": False,
    }
    assert ModelParallelConfig.read(neutral) == ModelParallelConfig.read({})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"microbatch": 4}, "microbatch is no key"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"microbatches": "4"}, "microbatches is '4': it must be of type int"),
        ({"ddp": 1}, "ddp is 1: it must be of type bool"),
        ({"pipeline": "fast"}, "pipeline is 'fast'"),
        ({"optimize": "both"}, "optimize is 'both'"),
        ({"memory_weight": 2}, "memory_weight is 2.0"),
        ({"placement_strategy": "DPP"}, "placement_strategy is 'DPP'"),
        ({"auto_partition": False}, "default_partition must be given"),
        ({"default_partition": 1}, "default_partition is 1: it must be below"),
        ({"shard_optimizer_state": True}, "shard_optimizer_state needs ddp"),
        ({"ddp_port": 1234}, "ddp_port and ddp_dist_backend need ddp"),
        ({"offload_activations": True}, "offload_activations needs microbatches"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 exclude"),
    ],
)
def test_a_rule_that_is_broken_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelParallelConfigError, match=re.escape(told)):
        ModelParallelConfig.read(given)


def test_parameters_may_be_wrapped_as_the_sdk_has_them() -> None:
    assert ModelParallelConfig.read({"enabled": True, "parameters": {"partitions": 3}}).pipeline_parallel_degree == 3
