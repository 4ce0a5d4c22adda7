// A search finds most words on many pages: what explains comes first, then headers, then reasons, results and sources.
var Scorer = {
  score: ([page, , , , score]) => score +
    (/^(README|examples|docs\/(guide|d2l-map|core|commands))/.test(page) ? 3 : /^(docs|include)/.test(page) ? 0 : -3) -
    (/^docs\/(decisions|results)/.test(page) ? 3 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: {}, objPrioDefault: 0,  // Sphinx's own numbers from here on
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
