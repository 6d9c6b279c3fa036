// An HTTP server that counts its requests in memory, and ticks.
const kept = { requests: 0, ticks: 0 };
setInterval(() => kept.ticks++, 5);
require("http")
  .createServer((request, response) => {
    kept.requests++;
    const before = kept.ticks;
    // Answered when the timer has gone on.
    const answer = () =>
      kept.ticks > before ? response.end(JSON.stringify({ requests: kept.requests, pid: process.pid })) : setTimeout(answer, 1);
    answer();
  })
  .listen(8000, "0.0.0.0", () => console.log("ready"));
