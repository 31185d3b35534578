// Shows the text of the node Attention report, and before its first run what will be there.

import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NODE = "MultimodalGenAttentionReport";
const BEFORE_A_RUN = "After a run, this shows which backend ran in every attention layer, and why.";

app.registerExtension({
  name: "multimodal_gen.attention_report",
  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const { widget } = ComfyWidgets.STRING(node, "text", ["STRING", { multiline: true }], app);
    node.setSize([420, 200]);
    widget.value = BEFORE_A_RUN;
    widget.options.read_only = true;
    const element = widget.inputEl ?? widget.element;
    if (element) element.readOnly = true;
    // It is neither an input of the node nor a part of a saved workflow.
    widget.serialize = false;
    widget.options.serialize = false;
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      if (output?.text) widget.value = output.text.join("\n");
    };
  },
});
