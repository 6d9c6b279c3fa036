(() => {
  const told = document.createElement("span");
  told.className = "unseen";
  told.setAttribute("role", "status");
  document.body.append(told);
  // The clipboard itself is there only over HTTPS and on this machine; the older way works everywhere.
  const copy = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    if (!copied) throw new Error("not copied");
  };
  for (const block of document.querySelectorAll("article pre")) {
    // Drawings, and what programs print.
    if (block.querySelector(".language-text")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      let outcome = "Copied";
      try {
        await copy(block.querySelector("code").textContent);
      } catch {
        outcome = "Select and copy by hand";
      }
      button.textContent = told.textContent = outcome;
      button.focus();
      setTimeout(() => { button.textContent = "Copy"; told.textContent = ""; }, 2000);
    });
    const frame = document.createElement("div");
    frame.className = "code";
    block.replaceWith(frame);
    frame.append(block, button);
  }
})();
