"""What a .tflite file of ours holds, read by the schema."""

from __future__ import annotations

from fastlstm.exchange.litert_file import packed


def with_float_products(data: bytes) -> bytes:
    """Returns a file that multiplies in float32 what this one multiplies in int8.

    Weights and scales are the same, and nothing else is rounded.

    Args:
        data: a file of ours, which is trusted.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(data)
    graph, code = model.subgraphs[0], schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    code.version = 5
    model.operatorCodes.append(code)
    operators, floats = [], dict[int, int]()
    for operator in graph.operators:
        kind = model.operatorCodes[operator.opcodeIndex].builtinCode
        place = operator.inputs[1] if kind == schema.BuiltinOperator.FULLY_CONNECTED else None
        if place is not None and graph.tensors[place].type == schema.TensorType.INT8:
            if place not in floats:
                floats[place] = len(graph.tensors)
                shape = graph.tensors[place].shape
                graph.tensors.append(schema.TensorT(shape=shape, name="floats", hasRank=True))
                dequantize = schema.OperatorT(opcodeIndex=len(model.operatorCodes) - 1)
                dequantize.inputs, dequantize.outputs = [place], [floats[place]]
                operators.append(dequantize)
            operator.inputs = [operator.inputs[0], floats[place], *operator.inputs[2:]]
        operators.append(operator)
    graph.operators = operators
    return packed(model, len(data))


def read_metadata(data: bytes) -> dict[str, str]:
    """Returns the texts that a .tflite file of ours carries along, by name.

    Args:
        data: the file, which is trusted.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(data, 0)
    entries = [model.Metadata(k) for k in range(model.MetadataLength())]
    texts = [bytes(model.Buffers(entry.Buffer()).DataAsNumpy()) for entry in entries]
    return {entry.Name().decode(): t.decode() for entry, t in zip(entries, texts, strict=True)}
