#!/bin/sh
#SBATCH --job-name=rw-text
#SBATCH --output="/home/ann/100%% mine/text/controller.log"
#SBATCH --chdir="/home/ann/100% mine/text"
#SBATCH --comment=text-1a2b
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:10
#SBATCH --cpus-per-gpu=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH hetjob
#SBATCH --job-name=rw-text
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:5
#SBATCH --cpus-per-gpu=1
#SBATCH --requeue
#SBATCH --open-mode=append

# Slurm sends SIGTERM to all of us; the controller knows what to do then.
trap : TERM INT
left=20
while [ $left -gt 0 ]; do
    python -m controller 'a b'
    code=$?
    [ $code -eq 0 ] && exit 0
    left=$((left - 1))
    sleep 1
done
exit $code
