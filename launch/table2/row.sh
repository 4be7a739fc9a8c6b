# The job of one row of the paper's Table 2. The script of the row hands on the repository, the row's name and what
# was given to it:
#
#   sbatch launch/table2/gmoe_w1.sbatch STREAM OUT [setting=value ...]    settings such as arch=switch_lm_large seed=1
#   bash launch/table2/gmoe_w1.sbatch STREAM OUT [setting=value ...]      the same command on this machine
#
# One task, for alma-lm starts fairseq-train on every GPU it sees. sequences_per_update must divide by batch_size
# times the GPUs of a member: on 8 of them arch=switch_lm_tiny wants batch_size=2.
#
# The same command continues: a job that a failing node or a preemption puts back into the queue goes on from its
# last checkpoint, and so does one that has come to its time limit, which puts itself back.
home=$1
row=$2
shift 2

if [ $# -lt 2 ]; then
    echo "usage: sbatch launch/table2/$row.sbatch STREAM OUT [setting=value ...]   (bash instead of sbatch: here)" >&2
    exit 2
fi
if [ ! -f "$home/.venv/bin/activate" ]; then
    echo "$row: $home/.venv is missing: run make setup at the top of the repository, and submit from there or set" \
        "ALMA_HOME to it" >&2
    exit 2
fi
. "$home/.venv/bin/activate"

command=(alma-lm "stream=$1" "out=$2" "preset=table2/$row" "${@:3}")
[ -n "${SLURM_JOB_ID:-}" ] || exec "${command[@]}"

# Interrupted, alma-lm ends its processes and gives the run folder back: the next job need not wait for a lease to
# run out. Without job control a process in the background of a script would ignore the interrupt.
set -m
out_of_time=
trap 'out_of_time=yes; kill -INT "$!" 2>/dev/null' USR1
trap 'kill -INT "$!" 2>/dev/null' TERM INT
"${command[@]}" &
pid=$!
wait "$pid"
status=$?
while kill -0 "$pid" 2>/dev/null; do # a signal has ended `wait`, not alma-lm
    wait "$pid"
    status=$?
done
if [ -n "$out_of_time" ] && [ "$status" -ne 0 ]; then
    echo "$row: out of time, job $SLURM_JOB_ID goes back into the queue and continues" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
