"""Images that were not made for everstep run, or say precisely why not."""

from __future__ import annotations

import pytest

from e2e.harness import Cluster, condition, python, training_job
from e2e.images.catalogue import image as find_image
from e2e.images.catalogue import images


def test_distroless_runs_in_plain_mode(cluster: Cluster, namespace: str) -> None:
    """No Python in the image: the pod is made once more without the agent, and status says so."""
    command = ["/bin/sh", "-c", "echo rank $RANK of $WORLD_SIZE on $SM_HOSTS"]
    job = training_job("bare", command, image="docker.io/everstep/distroless:test", numNodes=2)
    cluster.apply(job, namespace=namespace)
    done = cluster.wait_phase(namespace, "bare", "Succeeded", timeout=90)
    plain = condition(done, "PlainMode")
    assert plain["status"] == "True"
    assert plain["reason"] == "NoPython"
    assert done["status"]["restarts"]["application"] == 0
    output = cluster.all_logs(namespace, "bare")
    assert 'rank 0 of 2 on ["algo-1","algo-2"]' in output
    assert 'rank 1 of 2 on ["algo-1","algo-2"]' in output


def test_plain_mode_reports_the_exit_code(cluster: Cluster, namespace: str) -> None:
    job = training_job(
        "bare", ["/bin/sh", "-c", "exit 7"], image="docker.io/everstep/distroless:test", restart={"application": 0}
    )
    cluster.apply(job, namespace=namespace)
    failed = cluster.wait_phase(namespace, "bare", "Failed", timeout=90)
    assert failed["status"]["lastFailure"]["exitCode"] == 7


@pytest.mark.parametrize(("image", "needle"), [("python38", "3.8"), ("python-minimal", "asyncio")])
def test_a_python_that_cannot_carry_the_agent(cluster: Cluster, namespace: str, image: str, needle: str) -> None:
    if f"docker.io/everstep/{image}:test" not in {known.name for known in images()}:
        pytest.skip("no Python 3.8 on this machine to make an image of")
    job = training_job("old", ["python3", "-c", "print('ran anyway')"], image=f"docker.io/everstep/{image}:test")
    cluster.apply(job, namespace=namespace)
    done = cluster.wait_phase(namespace, "old", "Succeeded", timeout=90)
    plain = condition(done, "PlainMode")
    assert plain["reason"] == "PythonUnsupported"
    assert needle in plain["message"]
    assert "ran anyway" in cluster.all_logs(namespace, "old")


def test_an_image_that_needs_root(cluster: Cluster) -> None:
    """`securityProfile: image` is for namespaces whose owner permits it."""
    with cluster.namespace(**{"pod-security.kubernetes.io/enforce": "privileged"}) as namespace:
        source = "import os; assert os.getuid() == 0; open('/root/proof', 'w')"
        job = training_job("root", python(source), image="docker.io/everstep/root:test", securityProfile="image")
        cluster.apply(job, namespace=namespace)
        cluster.wait_phase(namespace, "root", "Succeeded")


def test_a_read_only_root_file_system_and_an_unknown_user(cluster: Cluster, namespace: str) -> None:
    source = """
import os, pathlib, tempfile, getpass
try:
    pathlib.Path('/proof').touch()
except OSError as error:
    print('read only:', error.strerror)
pathlib.Path(tempfile.gettempdir(), 'x').write_text('y')
pathlib.Path(os.environ['HOME'], 'x').write_text('y')
print('user', getpass.getuser(), os.getuid(), flush=True)
"""
    container = {"name": "trainer", "securityContext": {"readOnlyRootFilesystem": True, "runAsUser": 54321}}
    job = training_job("strange", python(source), podTemplate={"spec": {"containers": [container]}})
    cluster.apply(job, namespace=namespace)
    cluster.wait_phase(namespace, "strange", "Succeeded")
    output = cluster.all_logs(namespace, "strange")
    assert "read only: Read-only file system" in output
    assert "54321" in output


LOOK = """
import importlib.util, pathlib, shutil
from everstep_operator import __main__
__main__.leave_out_synchronous_client()
import everstep.agent, everstep_operator.app, kopf, kubernetes.aio.client
assert pathlib.Path(everstep.agent.__file__).with_name('config.py').exists(), 'the agent is packed from its sources'
print([name for name in ('sh', 'bash', 'dpkg', 'apt-get', 'pip', 'perl') if shutil.which(name)])
print([name for name in ('pip', 'setuptools', 'torch') if importlib.util.find_spec(name)])
"""


@pytest.mark.timeout(600)
def test_the_operators_image_holds_what_it_runs_and_little_else() -> None:
    operator = find_image("operator")
    assert operator.size <= 120_000_000
    assert operator.run("python", "-c", LOOK).splitlines() == ["[]", "[]"]
