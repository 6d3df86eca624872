"""Ranks, the process group and collectives: the names that most callers need."""

from yolo_seg_ddp.utils.distributed.collectives import (
    RankDisagreement,
    all_reduce_sum,
    any_rank,
    average_tensors,
    barrier,
    broadcast_from_main,
    check_ranks_agree,
    communication_device,
    gather_arrays,
    gather_files,
    gather_json,
    is_distributed,
    max_over_ranks,
    rank,
    run_on_main,
    run_once_per_machine,
    world_size,
)
from yolo_seg_ddp.utils.distributed.meeting import Meeting, apart, meet
from yolo_seg_ddp.utils.distributed.process_group import (
    RankInfo,
    Say,
    cleanup_ddp,
    collective_timeout_s,
    join_process_group,
    main_printer,
    read_rank_environment,
    setup_ddp,
)
