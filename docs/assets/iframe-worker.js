// The search of the pages runs in a Worker, which browsers do not start on a page that is opened as a file. On such a
// page, replace Worker by a class with the same interface that runs the script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.frame.contentDocument.createElement("script");
      script.src = new URL(url, location);
      this.started = new Promise(resolve => { script.onload = resolve; });
      this.frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.started.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
