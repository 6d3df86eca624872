"""The variables that Kubeflow's PyTorchJob sets in each machine's environment."""

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
