// Answers questions beside the page: a search keeps its thread busy.

import { answer, initSync, presets } from './playground.js';

let fault = '';
self.showProgress = (share) => postMessage({ progress: share });
self.showFault = (message) => { fault = message; };

onmessage = ({ data }) => {
  try {
    if (data.module) {
      initSync({ module: data.module });
      postMessage({ presets: JSON.parse(presets()) });
    } else {
      const found = JSON.parse(answer(JSON.stringify(data.question), data.columns));
      postMessage({ answer: found, number: data.number });
    }
  } catch (error) {
    postMessage({ fault: fault || String(error) });
  }
};
