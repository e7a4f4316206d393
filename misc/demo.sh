#!/bin/sh
# The main job on a real file: store it on ten storage directories, lose seven of them, get it back.
# Each line of output tells what was just shown. Needs `pipegrid` on the PATH; leaves nothing behind.
set -eu

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT INT TERM
grid=$scratch/grid
file=$scratch/file
run() { pipegrid -d "$grid" -q "$@"; }
step() { printf '%2d. %s\n' "$1" "$2"; }

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
