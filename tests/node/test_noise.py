"""What TensorFlow prints at every start stays in the node's log, and tells the driver nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from sparkdl.node.noise import noise_in, without_noise
from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, Lines, launch

NOISE = [  # of TensorFlow 2.15, 2.18 and 2.21
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795401356.688341   17395 port.cc:153] oneDNN custom operations are on. You may "
    "see slightly different numerical results",
    "2024-05-01 10:00:00.123456: I tensorflow/core/util/port.cc:113] oneDNN custom operations are",
    "2024-05-01 10:00:00.123456: I external/local_tsl/tsl/cuda/cudart_stub.cc:31] Could not find "
    "cuda drivers on your machine, GPU will not be used.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with "
    "the appropriate compiler flags.",
    "2024-05-01 10:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:485] "
    "Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one "
    "has already been registered",
    "W0000 00:00:1795401356.688341   17395 computation_placer.cc:177] computation placer already "
    "registered. Please check linkage and avoid linking the same target more than once.",
    "2024-05-01 10:00:00.123456: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT "
    "Warning: Could not find TensorRT",
    "I0000 00:00:1795401362.843849   17539 coordination_service.cc:505] Example stragglers:",
    "/job:worker/replica:0/task:1",
    "W0000 00:00:1795401363.312717   17395 dataset.cc:997] Input of GeneratorDatasetOp::Dataset "
    "will not be optimized because the dataset does not implement the AsGraphDefInternal() method",
    "/venv/keras/src/trainers/epoch_iterator.py:74: UserWarning: `shuffle=True` was passed, but "
    "will be ignored since the data `x` was provided as a tf.data.Dataset.",
    "  self.data_adapter = data_adapters.get_data_adapter(",
    " 25%|██▌       | 8/32 [00:00<00:00, 39.42it/s]",
    "Writing model shards: 100%|██████████| 1/1 [00:00<00:00, 155.70it/s]",
    "  0%|          | 0.00/1.2k [00:00<?, ?B/s]",
]
WORDS = [
    "I am a line of the user's, and WARNING: All log messages are not meant",
    "W0000 00:00:1795401363.312717   17395 cpu_allocator_impl.cc:83] Allocation of 1 exceeds 10%",
    "E0000 00:00:1795401363.312717   17395 cuda_driver.cc:1] failed call to cuInit: UNKNOWN ERROR",
    "F0000 00:00:1795401363.312717   17395 x.cc:1] Check failed: ok",
    "2024-05-01 10:00:00.123456: W tensorflow/core/framework/op_kernel.cc:1830] OP_REQUIRES failed",
    "2024-05-01 10:00:00.123456: I myapp/trainer.cc:12] step 3",
    "I0501 10:00:00.123456   17395 trainer.cc:12] glog of another library",
    "WARNING:tensorflow:of its Python",
    "UserWarning: Limiting steps_per_epoch to 5",
    "INFO:root:of Python",
    "  0%|          | 0/32 [00:00<?, ?it/s]/venv/x.py:759: UserWarning: a line of its own",
    "accuracy 25% | 8/32 [rows]",
    "",
]


def test_start_up_lines_are_told_from_warnings_errors_and_the_users_own() -> None:
    assert noise_in([*WORDS, *NOISE], {}) == tuple(range(len(WORDS), len(WORDS) + len(NOISE)))
    assert without_noise([*WORDS, *NOISE], 100) == tuple(WORDS)
    assert without_noise([*WORDS, *NOISE], 2) == tuple(WORDS[-2:])
    assert without_noise(WORDS, 0) == ()


@pytest.mark.parametrize("name", ["TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE"])
def test_who_asks_tensorflow_for_more_gets_it(name: str) -> None:
    assert noise_in(NOISE, {"TF_CPP_MIN_LOG_LEVEL": "2"})
    assert not noise_in(NOISE, {"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert not noise_in(NOISE, {name: "1"})


def speak_and_fail(gate: Gate, ctx: NodeContext) -> None:
    print(*NOISE, "mine", sep="\n", flush=True)
    gate.wait()
    raise ValueError("of the user's")


def test_driver_does_not_hear_it_and_the_nodes_log_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    gate, lines = Gate.at(tmp_path / "gate"), Lines()
    with (
        pytest.raises(NodeFailedError) as caught,
        launch(speak_and_fail, gate, nodes=1, observe=Observe(on_log=lines)) as cluster,
    ):
        lines.wait_for("mine")
        assert lines.of("worker:0") == ["mine"]
        assert cluster.logs(0) == [*NOISE, "mine"]
        gate.open()
        cluster.wait(SOON_S)
    assert list(caught.value.root_cause.log_tail) == ["mine"]


@pytest.mark.deep
@pytest.mark.tensorflow
def test_a_start_of_tensorflow_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(args: None, ctx: NodeContext) -> None:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        print(strategy.num_replicas_in_sync, int(tf.constant(1) + 1), flush=True)

    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    lines = Lines()
    with launch(compute, framework="tensorflow", observe=Observe(on_log=lines)) as cluster:
        cluster.wait(120)
        assert any("oneDNN" in line for line in cluster.logs(0)), cluster.logs(0)
    assert lines.of("worker:0") == lines.of("worker:1") == ["2 2"]
