"""What the planner's page adds to the common looks."""

from __future__ import annotations

from moefold.html.document import CSS as COMMON

CSS = (
    COMMON
    + """
:root{--c6:#7d55b8;--wait:#d9541e;--forward:#2468c9;--backward:#12836a;--weight:#b98100;--idle:#eceae3}
@media (prefers-color-scheme:dark){:root{--c6:#b294e6;--wait:#f0824e;--forward:#4f86d6;--backward:#2d9b7e;
--weight:#c99a2e;--idle:#292825}}
.c6{--c:var(--c6)}
.badge{white-space:nowrap}.cards{grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
h1 .badge{margin-left:8px}
.why p{margin:0 0 10px}.why p:last-child{margin:0}.why{max-width:none;line-height:1.6}
.held{display:grid;grid-template-columns:auto minmax(0,1fr) auto;gap:6px 12px;align-items:center;font-size:13px}
.held .track{position:relative;height:20px;background:var(--idle);border-radius:5px;overflow:hidden}
.held .track .bar{height:100%;border-radius:0;gap:1px}
.held .track .full{position:absolute;top:0;bottom:0;border-left:2px solid var(--bad)}
.held b{font-weight:600}.held .soft,.soft{color:var(--soft)}
.bar i.hidden{background:repeating-linear-gradient(45deg,var(--c) 0 3px,transparent 3px 7px);opacity:.75}
.keys{display:flex;flex-wrap:wrap;gap:4px 20px;margin-top:10px}
.wide-picture{overflow-x:auto}.wide-picture svg{min-width:860px}
.f{fill:var(--forward)}.b{fill:var(--backward)}.w{fill:var(--weight)}.idle{fill:var(--idle)}.wait{fill:var(--wait)}
.num{fill:#fff;font-size:9px;text-anchor:middle}
.point{fill:var(--c5);opacity:.45}.front{fill:none;stroke:var(--c1);stroke-width:1.6}
.star{fill:var(--c2);stroke:var(--card);stroke-width:1.5}
.second{fill:var(--c4);stroke:var(--card);stroke-width:1.5}.mine{fill:var(--c3);stroke:var(--card);stroke-width:1.5}
.onfront{fill:var(--c1);stroke:var(--card);stroke-width:1}
.limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 4}.label{fill:var(--ink);font-size:11.5px}
pre.command{white-space:pre;overflow-x:auto;background:var(--page);border:1px solid var(--line);
border-radius:8px;padding:12px 14px;margin:10px 0 0}
td.better{color:var(--good)}td.worse{color:var(--bad)}
td{white-space:nowrap}td.text,th.text{text-align:left}td.text{white-space:normal;min-width:120px}
.panel.scroll,.panel .scroll{max-height:none;overflow-x:auto}
details.below .panel{margin-top:10px}
form.ask{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px 14px;margin:0 0 22px}
form.ask label{font-size:12.5px;color:var(--soft);display:flex;flex-direction:column;gap:3px}
form.ask input,form.ask select,form.ask button{font:inherit;color:var(--ink);background:var(--card);padding:6px 8px;
border:1px solid var(--line);border-radius:7px;width:100%;min-width:0}
form.ask button{background:var(--c1);color:#fff;border:0;font-weight:600;cursor:pointer;align-self:end}
form.ask output{color:var(--ink);font-weight:600}form.ask input[type=range]{padding:0;accent-color:var(--c1)}
.asking{opacity:.45;transition:opacity .2s}
@media (max-width:640px){main{padding:22px 14px 40px}h1{font-size:23px}h2{margin:32px 0 10px}.card b{font-size:19px}
.card{padding:10px 12px}th,td{padding:5px 7px}
.held{grid-template-columns:auto minmax(0,1fr)}.held .amount{display:none}}
"""
)
