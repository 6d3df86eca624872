# The demos source this file. DEVICE: `cpu` hides the GPUs, `cuda` needs one; unset: what there is.
case ${DEVICE:-auto} in
auto) ;;
cpu) export CUDA_VISIBLE_DEVICES= ;;
cuda)
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.device_count())' || {
        echo "DEVICE=cuda: PyTorch sees no GPU; make demo-recipes uses the CPU" >&2
        exit 1
    }
    ;;
*)
    echo "DEVICE=$DEVICE: not one of auto, cpu, cuda" >&2
    exit 2
    ;;
esac

measure_step() { # a file, then folder/module and options of a training: with DEVICE=cuda its step in fp32, bf16 and fp16
    local file=$1
    shift
    [[ ${DEVICE:-} != cuda ]] ||
        PYTHONPATH=../..${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.gpu.recipes "$file" 20 "$@"
}
