// What pages can do better with a script; each of them works without it.
"use strict";

// Elements and words.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function amount(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${unit && bytes < 99.5 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function counted(count, noun, nouns = `${noun}s`) {
  return `${count} ${count === 1 ? noun : nouns}`;
}

// Live parts of a page: the same page is loaded again, and what differs is changed in place, so that the
// focus, open folds and what a screen reader has reached stay where they are.

function follow(here, there) {
  if (here.nodeType !== there.nodeType || here.nodeName !== there.nodeName) {
    here.replaceWith(document.importNode(there, true));
    return;
  }
  if (here.nodeType !== Node.ELEMENT_NODE) {
    if (here.data !== there.data) here.data = there.data;
    return;
  }
  for (const { name } of [...here.attributes]) {
    if (!there.hasAttribute(name) && !(name === "open" && here.nodeName === "DETAILS")) {
      here.removeAttribute(name);
    }
  }
  for (const { name, value } of there.attributes) {
    if (here.getAttribute(name) !== value) here.setAttribute(name, value);
  }
  const mine = [...here.childNodes];
  const theirs = [...there.childNodes];
  theirs.forEach((child, place) => {
    if (place < mine.length) follow(mine[place], child);
    else here.append(document.importNode(child, true));
  });
  mine.slice(theirs.length).forEach((child) => child.remove());
}

async function newestPage() {
  const response = await fetch(location.href.split("#")[0], {
    headers: { Accept: "text/html" },
    cache: "no-store",
  });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

async function refresh(id) {
  const there = (await newestPage()).getElementById(id);
  const here = document.getElementById(id);
  if (here && there) follow(here, there);
}

function liven() {
  const part = document.getElementById("live");
  if (!part || !part.dataset.live) return;
  const again = () => setTimeout(look, 1000 * Number(part.dataset.live));
  const look = async () => {
    if (!document.hidden) await refresh("live").catch(() => {});
    if (part.dataset.live) again();
  };
  again();
}

// Uploads: files and folders that are dropped or chosen, a few at a time, with what servers acknowledge.

const AT_ONCE = 4;
const LOOK_MS = 300;
const SAY_MS = 5000;
const MOST_LISTED = 100;

class Uploads {
  constructor(tools) {
    this.directory = tools.dataset.directory;
    this.batch = Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
    this.waiting = [];
    this.running = new Map();
    this.number = 0;
    this.count = this.done = this.failed = 0;
    this.bytes = this.doneBytes = 0;
    this.saidAt = 0;
    this.cancelled = false;
    this.busy = this.reading = false;
    this.build(tools);
  }

  build(tools) {
    const pick = (folder) => {
      const input = make("input", { type: "file", multiple: true, webkitdirectory: folder, hidden: true });
      input.addEventListener("change", () => {
        const entries = [...input.files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));
        input.value = "";
        this.add(entries, []);
      });
      return input;
    };
    const files = pick(false);
    const folder = pick(true);
    files.id = "drop-files";
    folder.id = "drop-folder";
    this.replace = make("input", { type: "checkbox", id: "drop-replace" });
    this.zone = make(
      "div",
      { class: "drop", id: "drop" },
      make("p", {}, "Drop files or folders here, or"),
      make("button", { type: "button", id: "choose-files", onclick: () => files.click() }, "Choose files"),
      make("button", { type: "button", id: "choose-folder", onclick: () => folder.click() }, "Choose a folder"),
      make("label", { class: "check" }, this.replace, "Replace files of the same name"),
      files,
      folder,
    );
    this.bar = make("progress", { max: 1, value: 0, "aria-label": "Bytes that servers have acknowledged" });
    this.words = make("p", { id: "upload-amount" });
    this.status = make("p", { role: "status", id: "upload-status", class: "hidden" });
    this.list = make("ul", { id: "upload-problems" });
    this.stop = make("button", { type: "button", class: "danger", id: "upload-cancel", onclick: () => this.cancel() }, "Cancel");
    this.panel = make(
      "section",
      { class: "panel", id: "uploads", "aria-label": "Uploads", hidden: true },
      this.words,
      make("p", { class: "progress" }, this.bar),
      this.list,
      make("div", { class: "actions" }, this.stop),
    );
    tools.after(this.zone, this.status, this.panel);
    this.listen();
  }

  listen() {
    const has = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    let depth = 0;
    const mark = (on) => this.zone.classList.toggle("over", on);
    addEventListener("dragenter", (event) => {
      if (has(event)) mark((depth += 1) > 0);
    });
    addEventListener("dragleave", (event) => {
      if (has(event)) mark((depth = Math.max(0, depth - 1)) > 0);
    });
    addEventListener("dragover", (event) => {
      if (has(event)) event.preventDefault();
    });
    addEventListener("drop", (event) => {
      if (!has(event)) return;
      event.preventDefault();
      mark((depth = 0) > 0);
      // The items are gone after the event, so all entries are taken at once.
      const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
      this.addEntries(entries);
    });
    addEventListener("beforeunload", (event) => {
      if (this.busy) event.preventDefault();
    });
  }

  async addEntries(entries) {
    this.reset();
    const files = [];
    const directories = [];
    const visit = async (entry, path) => {
      if (entry.isFile) {
        try {
          files.push({ path, file: await new Promise((good, bad) => entry.file(good, bad)) });
        } catch (error) {
          this.problem(path, `it cannot be read (${error.name})`);
        }
        return;
      }
      directories.push(path);
      const reader = entry.createReader();
      for (;;) {
        const some = await new Promise((good, bad) => reader.readEntries(good, bad));
        if (!some.length) return;
        for (const child of some) await visit(child, `${path}/${child.name}`);
      }
    };
    this.reading = true;
    for (const entry of entries) {
      try {
        await visit(entry, entry.name);
      } catch (error) {
        this.problem(entry.name, `it cannot be read (${error.name})`);
      }
    }
    const adding = this.add(files, directories);
    this.reading = false;
    await adding;
  }

  async add(entries, directories) {
    const known = new Set(directories);
    for (const { path } of entries) {
      const parts = path.split("/").slice(0, -1);
      parts.forEach((_, place) => known.add(parts.slice(0, place + 1).join("/")));
    }
    if (!entries.length && !known.size) return;
    this.begin(entries);
    const failed = new Set();
    for (const path of [...known].sort((a, b) => a.split("/").length - b.split("/").length)) {
      if (this.cancelled || [...failed].some((each) => path.startsWith(`${each}/`))) continue;
      const problem = await this.makeDirectory(path);
      if (problem) {
        failed.add(path);
        this.problem(path, problem);
      }
    }
    const inside = ({ path }) => [...failed].some((each) => path.startsWith(`${each}/`));
    for (const entry of entries) {
      if (!inside(entry)) this.waiting.push(entry);
      else this.over(entry, "its folder could not be made");
    }
    while (this.running.size < AT_ONCE && this.waiting.length) this.start();
    this.finishIfDone();
  }

  reset() {
    if (this.busy || this.reading) return;
    this.count = this.done = this.failed = this.bytes = this.doneBytes = 0;
    this.list.replaceChildren();
  }

  begin(entries) {
    this.reset();
    this.cancelled = false;
    this.busy = true;
    this.count += entries.length;
    this.bytes += entries.reduce((sum, { file }) => sum + file.size, 0);
    this.panel.hidden = this.stop.hidden = false;
    document.getElementById("listing")?.setAttribute("aria-busy", "true");
    this.say(`Uploading ${counted(this.count, "file")}, ${amount(this.bytes)}.`);
    this.show();
    if (!this.watch) this.watch = setInterval(() => this.look(), LOOK_MS);
  }

  url(path) {
    return this.directory + path.split("/").map(encodeURIComponent).join("/");
  }

  async makeDirectory(path) {
    const body = new URLSearchParams({ t: "mkdir" });
    try {
      const response = await fetch(this.url(path), { method: "POST", body });
      return response.ok ? null : (await response.text()).trim();
    } catch {
      return "the gateway does not answer";
    }
  }

  start() {
    const entry = this.waiting.shift();
    const number = (this.number += 1);
    const request = new XMLHttpRequest();
    this.running.set(number, { entry, request, part: 0 });
    const ended = (problem) => {
      this.running.delete(number);
      this.over(entry, problem);
      if (this.waiting.length) this.start();
      this.finishIfDone();
    };
    const query = `progress=${this.batch}.${number}&replace=${this.replace.checked ? "true" : "false"}`;
    request.open("PUT", `${this.url(entry.path)}?${query}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("Accept", "text/plain");
    request.onload = () => {
      if (request.status < 300) ended(null);
      else if (request.status === 409) ended("a file of this name is there already");
      else ended(request.responseText.trim() || `the gateway answered ${request.status}`);
    };
    request.onerror = () => ended("the connection to the gateway broke, or the file changed");
    request.onabort = () => ended("cancelled");
    request.send(entry.file);
  }

  over({ path, file }, problem) {
    if (problem) {
      this.failed += 1;
      this.bytes -= file.size;
      this.problem(path, problem);
    } else {
      this.done += 1;
      this.doneBytes += file.size;
    }
    this.show();
  }

  problem(path, text) {
    if (this.list.children.length < MOST_LISTED) {
      this.list.append(make("li", { class: "problem" }, `${path}: ${text}`));
    }
  }

  async look() {
    if (!this.running.size) return;
    try {
      const response = await fetch(`/uploads/${this.batch}`, { cache: "no-store" });
      const parts = await response.json();
      for (const [number, part] of Object.entries(parts)) {
        const one = this.running.get(Number(number));
        if (one) one.part = part;
      }
    } catch {
      return; // the next look may be answered
    }
    this.show();
    if (this.busy && Date.now() - this.saidAt > SAY_MS) this.say(this.words.textContent);
  }

  get acknowledged() {
    let sum = this.doneBytes;
    for (const { entry, part } of this.running.values()) sum += entry.file.size * part;
    return sum;
  }

  show() {
    this.bar.max = this.bytes || 1;
    this.bar.value = this.busy ? this.acknowledged : this.bytes || 1;
    this.words.textContent =
      `${amount(this.acknowledged)} of ${amount(this.bytes)} acknowledged by the servers, ` +
      `${this.done} of ${counted(this.count, "file")} stored`;
  }

  say(text) {
    this.saidAt = Date.now();
    this.status.textContent = text;
  }

  cancel() {
    this.cancelled = true;
    for (const entry of this.waiting.splice(0)) this.over(entry, "cancelled");
    for (const { request } of [...this.running.values()]) request.abort();
    this.finishIfDone();
  }

  async finishIfDone() {
    if (!this.busy || this.running.size || this.waiting.length) return;
    this.busy = false;
    clearInterval(this.watch);
    this.watch = null;
    this.stop.hidden = true;
    this.show();
    await refresh("listing").catch(() => {});
    document.getElementById("listing")?.removeAttribute("aria-busy");
    const bad = this.failed ? `, ${counted(this.failed, "file")} not` : "";
    this.say(`${counted(this.done, "file")} stored, ${amount(this.doneBytes)}${bad}.`);
  }
}

const tools = document.getElementById("tools");
if (tools?.dataset.directory) new Uploads(tools);
liven();
