# Two machines on one: two network namespaces with a cable between them, and a Ray node in each. Needs root, on Linux.
#
#     sh two_nodes.sh jackfield run FILE --address 10.213.7.1:6379
#
# does the command on the first of them. Whatever happens, nothing is left behind.
set -eu

first=jackfield-$$-1
second=jackfield-$$-2
ray_folder=$(mktemp -d)
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"

end() {
    trap - EXIT INT TERM HUP
    for node in $second $first; do
        for _ in 1 2 3 4 5; do
            processes=$(ip netns pids $node) && [ -n "$processes" ] || break
            kill -9 $processes || true # what runs there, and nothing else
            sleep 0.2
        done
        ip netns delete $node || true
    done
    rm -rf "$ray_folder"
}
trap end EXIT
trap 'exit 1' INT TERM HUP

ip netns add $first
ip netns add $second
ip link add cable netns $first type veth peer name cable netns $second
ip -n $first address add 10.213.7.1/24 dev cable
ip -n $second address add 10.213.7.2/24 dev cable
for node in $first $second; do
    ip -n $node link set lo up
    ip -n $node link set cable up
done

# On the first machine, then on the second:
ip netns exec $first ray start --head --node-ip-address=10.213.7.1 --port=6379 --num-cpus="${FIRST_CPUS:-2}" \
    --object-store-memory=200000000 --include-dashboard=false --disable-usage-stats --temp-dir="$ray_folder" >&2
ip netns exec $second ray start --address=10.213.7.1:6379 --node-ip-address=10.213.7.2 --num-cpus="${SECOND_CPUS:-2}" \
    --object-store-memory=200000000 --disable-usage-stats >&2

# And the run, on the first:
ip netns exec $first "$@" &
wait $!
