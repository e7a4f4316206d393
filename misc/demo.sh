#!/bin/sh
# The main job on a real file: store it on ten storage directories, lose seven of them, get it back; and the
# same with ten storage servers. Each line of output tells what was just shown. Needs `pipegrid` on the PATH;
# leaves no file and no process behind, also when it is interrupted or nobody reads it any more.
set -eu

scratch=$(mktemp -d)
servers=
clean_up() {
    for server in $servers; do kill "$server" 2>/dev/null || true; done
    for server in $servers; do wait "$server" 2>/dev/null || true; done
    rm -rf "$scratch"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE # whoever has started it is gone: a shell that dies of this signal cleans nothing up
trap 'exit 143' TERM
grid=$scratch/grid
file=$scratch/file
run() { pipegrid -d "$grid" -q "$@"; }
step() { printf '%2d. %s\n' "$1" "$2"; }

# Needed at step 11: they can start meanwhile.
for number in 00 01 02 03 04 05 06 07 08 09; do
    pipegrid -d "$scratch/server$number" -q serve --port tcp:0:interface=127.0.0.1 \
        >"$scratch/nurl$number" 2>"$scratch/log$number" &
    servers="$servers $!"
done

run init --local >/dev/null
step 1 "A grid of ten storage directories was made, any 3 of 10 shares to restore a file."

head -c 4000000 /dev/urandom >"$file"
step 2 "A file of 4,000,000 random bytes was made."

cap=$(run put "$file")
step 3 "It was encrypted, coded and stored; its cap is $(printf %s "$cap" | cut -c1-16)...$(printf %s "$cap" | tail -c 13)"

stored=$(du -sk "$grid/storage" | cut -f1)
shares=$(find "$grid/storage" -path '*/shares/*' -type f | wc -l | tr -d ' ')
step 4 "On disk there are $shares shares, $stored KiB in all: ten thirds of the file, and a few hashes."

run check "$cap" --verify >/dev/null
step 5 "Every byte of every share was read back and verified against the cap."

for number in 00 01 02 03 04 05 06; do rm -r "$grid/storage/$number"; done
step 6 "Seven of the ten storage directories were deleted: $(run check "$cap" || true)."

run get "$cap" -o "$scratch/back"
cmp "$file" "$scratch/back"
step 7 "The file came back from the three that are left; it is the same, bit for bit."

rm -r "$grid/storage/07"
status=0
run get "$cap" -o "$scratch/lost" 2>/dev/null || status=$?
[ "$status" = 4 ] && [ ! -e "$scratch/lost" ]
step 8 "With only two left it does not: exit status 4, and no file was written."

[ "$(run put "$file")" = "$cap" ]
step 9 "Storing it again gave the same cap: $(run check "$cap")."

tail -c +1000001 "$file" | head -c 100 >"$scratch/part"
run get "$cap" --range 1000000-1000099 | cmp - "$scratch/part"
step 10 "A range of 100 bytes from the middle was fetched alone, and is the same too."

net=$scratch/net
mkdir -p "$net/private"
echo "storage:" >"$net/private/servers.yaml"
for number in 00 01 02 03 04 05 06 07 08 09; do
    tries=0
    until [ -s "$scratch/nurl$number" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || { cat "$scratch/log$number" >&2; exit 1; }
        sleep 0.1
    done
    printf '  v0-server%s:\n    ann:\n      anonymous-storage-NURLs: ["%s"]\n' \
        "$number" "$(head -n 1 "$scratch/nurl$number")" >>"$net/private/servers.yaml"
done
run() { pipegrid -d "$net" -q "$@"; }
run init >/dev/null
step 11 "Ten storage servers are running, each a process that speaks HTTPS on a port of its own."

cap=$(run put "$file")
run get "$cap" | cmp - "$file"
step 12 "The file was stored on them, one share each, and fetched: $(run check "$cap")."

left=3
for server in $servers; do
    [ "$(echo "$servers" | wc -w)" -gt "$left" ] || break
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    servers=${servers#" $server"}
done
found=$(run check "$cap" || true)
case $found in healthy*) echo "the servers that were killed are still counted: $found" >&2; exit 1 ;; esac
step 13 "Seven of the ten servers were killed: $found."

run get "$cap" | cmp - "$file"
step 14 "The file came back from the three that are left; the same again, bit for bit."
