// Search in pages that are opened as files. Browsers start no worker from a file, so this one runs
// the worker's script in a hidden frame, and passes messages between the page and the frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.started = new Promise((loaded) => { frame.onload = loaded; }).then(() => {
        this.inside = frame.contentWindow;
        this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        this.inside.importScripts = (...urls) =>
          urls.reduce((earlier, next) => earlier.then(() => run(this.inside, next)), Promise.resolve());
        return run(this.inside, url);
      });
      document.documentElement.append(frame);
    }

    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };

  function run(inside, url) {
    return new Promise((loaded, failed) => {
      const script = inside.document.createElement("script");
      script.onload = loaded;
      script.onerror = failed;
      script.src = new URL(url, location.href).href;
      inside.document.body.append(script);
    });
  }
}
