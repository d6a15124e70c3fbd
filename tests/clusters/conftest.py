"""Ray clusters of this machine: several nodes that are processes."""

import os

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
STORE = 100 * 2**20
"""Bytes of a node's object store."""


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of two cores, joined; ended with the module."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False},
    )
    made.add_node(num_cpus=2, object_store_memory=STORE)
    ray.init(made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
