// What pages can do better with a script; each of them works without it.
"use strict";
