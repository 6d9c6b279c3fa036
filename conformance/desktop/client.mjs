/* A program with the desktop client of JavaScript: what client.py does, with the same words and answers.

   node client.mjs FILE */

import { writeFileSync } from "node:fs";
import { createInterface } from "node:readline/promises";
import { CommandExitError, Sandbox } from "@e2b/desktop";

const EVENTS = "/home/user/events";
const TITLE = "Event Tester";
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** What a look shows as soon as it shows anything. */
async function soon(look) {
  const deadline = Date.now() + 60_000;
  for (;;) {
    let seen;
    try {
      seen = await look();
    } catch (error) {
      if (!(error instanceof CommandExitError)) throw error;
    }
    if (seen) return seen;
    if (Date.now() > deadline) throw new Error(`nothing was shown: ${look}`);
  }
}

/** The parts of a stream. */
async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

/** What the caller says to what there is to see. */
async function asked(what) {
  console.log(JSON.stringify(what));
  return (await lines.next()).value;
}

/** What a window was told since it was last asked: buttons with their place on the screen, and keys. */
async function events(desk, buttons = 0) {
  // The server tells keys in order, so one at the end says that those before it have arrived. Buttons may come later: the window
  // manager holds each back until it has looked at it.
  await desk.press("f12");
  const text = await soon(async () => {
    const seen = await desk.files.read(EVENTS);
    const told = (seen.match(/^Button.* event/gm) ?? []).length;
    return seen.split("keysym 0xffc9").length === 3 && told >= buttons && seen;
  });
  await desk.commands.run(`: >${EVENTS}`);
  const found = [];
  for (const part of text.split("\n\n")) {
    const name = part.split(" event")[0].trim();
    if (name.includes("Button")) {
      const place = part.split("root:(")[1].split(")")[0];
      found.push([name, parseInt(part.split("button ")[1]), ...place.split(",").map(Number)]);
    } else if (name === "KeyPress" && !part.includes("F12")) {
      found.push([part.split("(keysym ")[1].split(", ")[1].split(")")[0]]);
    }
  }
  return found;
}

async function calls(desk) {
  const place = ({ x, y }) => [x, y];
  const size = async () => (({ width, height }) => [width, height])(await desk.getScreenSize());
  const window_of = async (name) => (await soon(async () => (await desk.getApplicationWindows(name)).filter(Boolean)[0]));
  // While a program starts, its window has the program's name alone.
  const titled = (window) => soon(async () => { const title = await desk.getWindowTitle(window); return title.includes(" - ") && title; });
  const found = { cursor: place(await desk.getCursorPosition()), screen: await size() };
  await desk.commands.run(`xev -geometry 300x200+300+300 -event button -event keyboard >>${EVENTS}`, { background: true, timeoutMs: 0 });
  const window = await soon(async () => (await desk.commands.run(`xdotool search --onlyvisible --name '${TITLE}'`)).stdout.trim());
  // The window manager places it, and gives it the keyboard when it is clicked.
  await soon(() => desk.commands.run(`xdotool windowmove --sync ${window} 300 300 windowfocus --sync ${window}`));
  await desk.leftClick(400, 400);
  await soon(async () => (await desk.files.read(EVENTS)).includes("ButtonRelease"));
  await desk.commands.run(`: >${EVENTS}`);

  await desk.moveMouse(401, 402);
  found.moved = place(await desk.getCursorPosition());
  // One click after the other: what the window manager has held back has the place where the mouse is by then.
  await desk.leftClick();
  found.left = await events(desk, 2);
  await desk.leftClick(410, 420);
  found.left.push(...(await events(desk, 2)));
  await desk.doubleClick(411, 421);
  found.double = await events(desk, 4);
  await desk.rightClick(412, 422);
  found.others = await events(desk, 2);
  await desk.middleClick(413, 423);
  found.others.push(...(await events(desk, 2)));
  await desk.scroll("up", 2);
  await desk.scroll("down", 1);
  found.scrolled = await events(desk, 6);
  await desk.mousePress("right");
  await desk.mouseRelease("right");
  await desk.drag([420, 430], [450, 460]);
  found.dragged = await events(desk, 4);
  await desk.press("a");
  await desk.press("page_up");
  await desk.press(["ctrl", "shift", "x"]);
  await desk.write("Hi, you!");
  found.keys = (await events(desk)).map(([key]) => key);
  found.window = [(await desk.getCurrentWindowId()) === window, await desk.getWindowTitle(window)];
  await desk.commands.run("pkill xev");

  await desk.files.write("/home/user/note.txt", "first\n");
  await desk.open("/home/user/note.txt");
  const editor = await window_of("mousepad");
  found.opened = await titled(editor);
  await soon(async () => (await desk.getCurrentWindowId()) === editor);
  const long = "'quoted' \"text\" -- of more than one piece, $HOME";
  await desk.write(long);
  await desk.press(["ctrl", "s"]);
  const typed = await soon(async () => {
    const text = await desk.files.read("/home/user/note.txt");
    return text !== "first\n" && text;
  });
  found.typed = typed === `${long}first\n`;
  await desk.press(["ctrl", "q"]);
  await desk.launch("thunar", "/usr/share");
  const files = await window_of("thunar");
  found.launched = await titled(files);
  await soon(async () => (await desk.getCurrentWindowId()) === files);
  await desk.press(["alt", "f4"]);
  const begun = performance.now();
  await desk.wait(300);
  found.waited = performance.now() - begun >= 300;

  const terminal = "xfce4-terminal --fullscreen --hide-menubar --hide-scrollbar --color-bg=#204060 -x sleep 600";
  await desk.commands.run(terminal, { background: true, timeoutMs: 0 });
  await window_of("xfce4-terminal");
  for (const take of [
    () => desk.screenshot(),
    async () => Buffer.from(await (await desk.screenshot("blob")).arrayBuffer()),
    async () => Buffer.concat(await collected(await desk.screenshot("stream"))),
  ]) {
    let answer = "again";
    while (answer === "again") {
      writeFileSync(process.argv[2], await take());
      answer = await asked({ screen: await size() });
    }
  }

  try {
    desk.stream.getAuthKey();
  } catch (error) {
    found["no key"] = String(error).includes("requireAuth");
  }
  await desk.stream.start({ requireAuth: true });
  try {
    await desk.stream.start();
  } catch (error) {
    found.twice = error.message;
  }
  const key = desk.stream.getAuthKey();
  const urls = [desk.stream.getUrl({ authKey: key }), desk.stream.getUrl({ autoConnect: false, viewOnly: true, resize: "off" })];
  await asked({ urls, key, host: desk.getHost(6080) });
  await desk.stream.stop();
  await soon(async () => !(await desk.commands.run("ps -e -o comm=")).stdout.includes("x11vnc"));
  return found;
}

const desk = await Sandbox.create({ timeoutMs: 300_000 });
try {
  console.log(JSON.stringify(await calls(desk)));
} finally {
  await desk.kill();
}
process.exit(0);
