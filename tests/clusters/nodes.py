"""Ray clusters of this machine, whose nodes are processes."""

from contextlib import contextmanager

STORE = 100 * 2**20
"""Bytes of a node's object store."""


@contextmanager
def two_nodes(cores):
    """Two nodes of so many cores, joined while the block lasts."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cores, "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.add_node(**node)
    ray.init(made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def weights(folder):
    """Everything but the report, which holds seconds and hosts."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "coec.json"
    }
