#!/bin/bash
# SLURM with four nodes on this machine, on loopback, as root: DIRECTORY holds its state, `stop` ends it.
# usage: slurm_cluster.sh start|stop DIRECTORY GRACE_SECONDS
set -eu
directory=$2 host=$(hostname -s)
case $1 in
stop)
    for file in "$directory"/slurmd.*.pid "$directory"/slurmctld.pid "$directory"/munged.pid; do
        [ -f "$file" ] && kill "$(cat "$file")" || true
    done
    exit 0 ;;
esac
mkdir -p "$directory"/{state,log,spool}
chmod 755 "$directory"
head -c 1024 /dev/urandom > "$directory/munge.key"
chmod 400 "$directory/munge.key"
munged --force --key-file="$directory/munge.key" --socket="$directory/munge.socket" --pid-file="$directory/munged.pid" \
    --log-file="$directory/log/munged.log" --seed-file="$directory/munge.seed"
cat > "$directory/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket=$directory/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool/%n
SlurmctldPidFile=$directory/slurmctld.pid
SlurmdPidFile=$directory/slurmd.%n.pid
SlurmctldLogFile=$directory/log/slurmctld.log
SlurmdLogFile=$directory/log/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-4] NodeHostname=$host NodeAddr=127.0.0.1 Port=17001-17004 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n[1-4] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=$3 MaxTime=60 State=UP
PartitionName=high Nodes=n[1-4] PriorityTier=10 MaxTime=60 State=UP
CONF
export SLURM_CONF=$directory/slurm.conf
slurmctld -f "$SLURM_CONF" -c
for node in 1 2 3 4; do slurmd -f "$SLURM_CONF" -N "n$node"; done
