// How Sphinx's search ranks pages. Many pages have a section on what is asked, and Sphinx gives all
// of them the same score: the page that is named after it comes first, then those that most people
// need, and design pages and the changelog last.
const ASKED = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase();
const MOSTLY = /^(compile|derivatives|fallback|forces|recompute|sharing|sizes|training-step)$/;
const LAST = /^(changelog|rooms|contributing|extending|read-first|design)/;

var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 30,
  partialTitle: 12,
  term: 5,
  partialTerm: 1,
  score: ([docname, title, , , score]) => {
    const words = ASKED.split(/\s+/).filter((word) => word.length > 2);
    const isNamed = words.some((word) => title.toLowerCase().includes(word));
    const points = score + (isNamed ? 8 : 0) + (MOSTLY.test(docname) ? 4 : 0);
    return LAST.test(docname) ? points / 4 : points;
  },
};
