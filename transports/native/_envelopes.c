/* KnownEnvelopes: envelopes of a channel that differ only in their numbers. Part of the module flowrt.transports.native._words.
 *
 * wire/codec.py encodes and decodes; it gives each form of an envelope that it has written or checked to `learn`. From then on an equal
 * message is written, and equal bytes are read, without msgspec: the form's bytes, and between them the sequence number and the four
 * numbers of the tag. What has no form, or differs from it in any byte, goes to codec.py.
 */
#include "_words.h"
#include <structmember.h>

#define MAX_FORMS 16

static const char *const MESSAGE_FIELDS[] = {"kind", "tag", "edge", "header", "tensors", "lent"};
static const char *const TAG_FIELDS[] = {"source", "epoch", "micro_batch", "step", "layer"};
static const char *const TENSOR_FIELDS[] = {"spec", "data"};

typedef struct {
    PyObject *kind, *edge, *source, *header, *header_bytes, *spec, *before, *after; /* source: None: there is no tag */
    Py_ssize_t payload_bytes;
} Form;

struct KnownEnvelopes {
    PyObject_HEAD
    PyObject *message_type, *tag_type, *tensor_type;
    Py_ssize_t message[6], tag[5], tensor[2]; /* offsets of the fields */
    int num_forms, last;
    Form forms[MAX_FORMS];
};

#define FIELD(object, offset) (*(PyObject **)((char *)(object) + (offset)))

static int find_fields(PyObject *type, const char *const *names, int count, Py_ssize_t *offsets)
{
    for (int field = 0; field < count; field++) {
        PyObject *member = PyObject_GetAttrString(type, names[field]);
        if (!member)
            return 0;
        int is_field = Py_TYPE(member) == &PyMemberDescr_Type && ((PyMemberDescrObject *)member)->d_member->type == T_OBJECT_EX;
        if (is_field)
            offsets[field] = ((PyMemberDescrObject *)member)->d_member->offset;
        else
            PyErr_Format(PyExc_TypeError, "%s is not a field of a struct", names[field]);
        Py_DECREF(member);
        if (!is_field)
            return 0;
    }
    return 1;
}

static PyObject *known_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"message_type", "tag_type", "tensor_type", NULL};
    PyObject *message, *tag, *tensor;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &message, &tag, &tensor))
        return NULL;
    KnownEnvelopes *self = (KnownEnvelopes *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->message_type = Py_NewRef(message);
    self->tag_type = Py_NewRef(tag);
    self->tensor_type = Py_NewRef(tensor);
    if (!find_fields(message, MESSAGE_FIELDS, 6, self->message) || !find_fields(tag, TAG_FIELDS, 5, self->tag) ||
        !find_fields(tensor, TENSOR_FIELDS, 2, self->tensor))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void known_dealloc(KnownEnvelopes *self)
{
    for (int index = 0; index < self->num_forms; index++) {
        Form *form = self->forms + index;
        PyObject *parts[] = {form->kind, form->edge, form->source, form->header, form->header_bytes, form->spec, form->before, form->after};
        for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
            Py_DECREF(parts[part]);
    }
    Py_XDECREF(self->message_type);
    Py_XDECREF(self->tag_type);
    Py_XDECREF(self->tensor_type);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int is_equal(PyObject *one, PyObject *other)
{
    if (one == other)
        return 1;
    if (!one || Py_TYPE(one) != Py_TYPE(other))
        return 0;
    int equal = PyObject_RichCompareBool(one, other, Py_EQ);
    if (equal < 0)
        PyErr_Clear();
    return equal > 0;
}

static PyObject *known_learn(KnownEnvelopes *self, PyObject *const *args, Py_ssize_t count)
{
    if (!flowrt_expect(count, 9))
        return NULL;
    Py_ssize_t payload_bytes = PyLong_AsSsize_t(args[8]);
    if (payload_bytes == -1 && PyErr_Occurred())
        return NULL;
    if (!PyUnicode_CheckExact(args[0]) || !PyLong_CheckExact(args[1]) || !PyBytes_CheckExact(args[6]) || !PyBytes_CheckExact(args[7]))
        return PyErr_Format(PyExc_TypeError, "a kind, an edge, a source, a header, its bytes, a spec, the bytes around the numbers, a size");
    if (self->num_forms == MAX_FORMS || PyBytes_GET_SIZE(args[6]) + PyBytes_GET_SIZE(args[7]) > MAX_ENVELOPE_BYTES - 6 * 9)
        Py_RETURN_NONE;
    for (int index = 0; index < self->num_forms; index++)
        if (is_equal(args[6], self->forms[index].before) && is_equal(args[7], self->forms[index].after))
            Py_RETURN_NONE; /* a message that found no room */
    for (int part = 0; part < 8; part++)
        Py_INCREF(args[part]);
    self->forms[self->num_forms++] = (Form){args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7], payload_bytes};
    Py_RETURN_NONE;
}

static PyObject *known_is_full(KnownEnvelopes *self, void *unused)
{
    return PyBool_FromLong(self->num_forms == MAX_FORMS);
}

/* Numbers as MessagePack writes them, in the fewest bytes. */
static unsigned char *put_number(unsigned char *to, uint64_t value)
{
    int nbytes = value < 1 << 8 ? 1 : value < 1 << 16 ? 2 : value < (uint64_t)1 << 32 ? 4 : 8;
    if (value < 128) {
        *to++ = (unsigned char)value;
        return to;
    }
    *to++ = nbytes == 1 ? 0xcc : nbytes == 2 ? 0xcd : nbytes == 4 ? 0xce : 0xcf;
    while (nbytes--)
        *to++ = (unsigned char)(value >> 8 * nbytes);
    return to;
}

/* Reads one; NULL for anything else, and for a number that `put_number` writes otherwise. */
static const unsigned char *get_number(const unsigned char *from, const unsigned char *end, uint64_t *value)
{
    if (from == end)
        return NULL;
    if (*from < 128) {
        *value = *from;
        return from + 1;
    }
    if (*from < 0xcc || *from > 0xcf)
        return NULL;
    int nbytes = 1 << (*from++ - 0xcc);
    if (end - from < nbytes)
        return NULL;
    *value = 0;
    for (int index = 0; index < nbytes; index++)
        *value = *value << 8 | *from++;
    unsigned char again[9];
    return put_number(again, *value) - again == nbytes + 1 ? from : NULL;
}

static int number_of(PyObject *object, uint64_t *value)
{
    if (!object || !PyLong_CheckExact(object))
        return 0;
    *value = PyLong_AsUnsignedLongLong(object);
    if (*value != (uint64_t)-1 || !PyErr_Occurred())
        return 1;
    PyErr_Clear();
    return 0;
}

static int has_form(KnownEnvelopes *self, Form *form, PyObject *message, PyObject *source, PyObject *spec)
{
    return is_equal(FIELD(message, self->message[0]), form->kind) && is_equal(FIELD(message, self->message[2]), form->edge) &&
           is_equal(source, form->source) && is_equal(spec, form->spec) && is_equal(FIELD(message, self->message[3]), form->header);
}

size_t flowrt_known_encode(KnownEnvelopes *self, PyObject *message, uint64_t sequence, char *envelope, PyObject **data, size_t *payload_bytes)
{
    if ((PyObject *)Py_TYPE(message) != self->message_type || FIELD(message, self->message[5]) != Py_None)
        return 0;
    PyObject *tag = FIELD(message, self->message[1]), *tensors = FIELD(message, self->message[4]);
    if (!tag || !tensors || !PyTuple_CheckExact(tensors) || PyTuple_GET_SIZE(tensors) > 1)
        return 0;
    uint64_t numbers[4];
    if (tag != Py_None) {
        if ((PyObject *)Py_TYPE(tag) != self->tag_type)
            return 0;
        for (int index = 0; index < 4; index++)
            if (!number_of(FIELD(tag, self->tag[1 + index]), numbers + index))
                return 0;
    }
    PyObject *tensor = PyTuple_GET_SIZE(tensors) ? PyTuple_GET_ITEM(tensors, 0) : NULL;
    if (tensor && (PyObject *)Py_TYPE(tensor) != self->tensor_type)
        return 0;
    PyObject *source = tag == Py_None ? Py_None : FIELD(tag, self->tag[0]), *spec = tensor ? FIELD(tensor, self->tensor[0]) : Py_None;
    for (int tried = 0; tried < self->num_forms; tried++) {
        int index = (self->last + tried) % self->num_forms;
        Form *form = self->forms + index;
        if (!has_form(self, form, message, source, spec))
            continue;
        self->last = index;
        unsigned char *to = (unsigned char *)envelope;
        *to++ = 0x96;
        to = put_number(to, sequence);
        memcpy(to, PyBytes_AS_STRING(form->before), (size_t)PyBytes_GET_SIZE(form->before));
        to += PyBytes_GET_SIZE(form->before);
        for (int number = 0; tag != Py_None && number < 4; number++)
            to = put_number(to, numbers[number]);
        memcpy(to, PyBytes_AS_STRING(form->after), (size_t)PyBytes_GET_SIZE(form->after));
        to += PyBytes_GET_SIZE(form->after);
        *data = tensor ? FIELD(tensor, self->tensor[1]) : NULL;
        *payload_bytes = (size_t)form->payload_bytes;
        return (size_t)(to - (unsigned char *)envelope);
    }
    return 0;
}

PyObject *flowrt_known_decode(KnownEnvelopes *self, const char *envelope, size_t nbytes, uint64_t expected, const char *payload,
                              size_t payload_bytes)
{
    const unsigned char *from = (const unsigned char *)envelope, *end = from + nbytes;
    uint64_t sequence, numbers[4];
    if (!nbytes || *from++ != 0x96 || !(from = get_number(from, end, &sequence)) || sequence != expected)
        return NULL;
    for (int tried = 0; tried < self->num_forms; tried++) {
        int index = (self->last + tried) % self->num_forms;
        Form *form = self->forms + index;
        size_t num_before = (size_t)PyBytes_GET_SIZE(form->before), num_after = (size_t)PyBytes_GET_SIZE(form->after);
        if ((size_t)form->payload_bytes != payload_bytes || (size_t)(end - from) < num_before + num_after ||
            memcmp(from, PyBytes_AS_STRING(form->before), num_before))
            continue;
        const unsigned char *at = from + num_before;
        int has_tag = form->source != Py_None;
        for (int number = 0; has_tag && at && number < 4; number++)
            at = get_number(at, end, numbers + number);
        if (!at || (size_t)(end - at) != num_after || memcmp(at, PyBytes_AS_STRING(form->after), num_after))
            continue;
        self->last = index;
        PyObject *fields[] = {form->kind, Py_None, form->edge, form->header_bytes, NULL};
        PyObject *tag = NULL, *tensors = NULL, *message = NULL;
        if (has_tag) {
            PyObject *of_tag[5] = {form->source};
            int made = 0;
            while (made < 4 && (of_tag[1 + made] = PyLong_FromUnsignedLongLong(numbers[made])))
                made++;
            if (made == 4)
                fields[1] = tag = PyObject_Vectorcall(self->tag_type, of_tag, 5, NULL);
            while (made--)
                Py_DECREF(of_tag[1 + made]);
            if (!tag)
                return NULL;
        }
        if (form->spec == Py_None)
            tensors = PyTuple_New(0);
        else {
            PyObject *of_tensor[] = {form->spec, PyByteArray_FromStringAndSize(payload, (Py_ssize_t)payload_bytes)};
            PyObject *tensor = of_tensor[1] ? PyObject_Vectorcall(self->tensor_type, of_tensor, 2, NULL) : NULL;
            Py_XDECREF(of_tensor[1]);
            tensors = tensor ? PyTuple_Pack(1, tensor) : NULL;
            Py_XDECREF(tensor);
        }
        if ((fields[4] = tensors))
            message = PyObject_Vectorcall(self->message_type, fields, 5, NULL);
        Py_XDECREF(tag);
        Py_XDECREF(tensors);
        return message;
    }
    return NULL;
}

static PyObject *known_encode(KnownEnvelopes *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t sequence;
    if (!flowrt_expect(count, 2) || !flowrt_uint64(args[1], &sequence))
        return NULL;
    char envelope[MAX_ENVELOPE_BYTES];
    PyObject *data;
    size_t payload_bytes, nbytes = flowrt_known_encode(self, args[0], sequence, envelope, &data, &payload_bytes);
    if (!nbytes)
        Py_RETURN_NONE;
    return Py_BuildValue("(y#n)", envelope, (Py_ssize_t)nbytes, (Py_ssize_t)payload_bytes);
}

static PyMethodDef known_methods[] = {
    {"learn", (PyCFunction)(void (*)(void))known_learn, METH_FASTCALL,
     "learn(kind, edge, source, header, header_bytes, spec, before, after, payload_bytes): a form; None for a part that is not there."},
    {"encode", (PyCFunction)(void (*)(void))known_encode, METH_FASTCALL,
     "encode(message, sequence) -> (envelope, payload bytes), or None for a message without a form."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef known_attributes[] = {
    {"is_full", (getter)known_is_full, NULL, "Whether no more forms are kept.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject KnownEnvelopesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.transports.native._words.KnownEnvelopes",
    .tp_doc = "KnownEnvelopes(message_type, tag_type, tensor_type): forms of the envelopes of one direction of a channel.",
    .tp_basicsize = sizeof(KnownEnvelopes),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = known_new,
    .tp_dealloc = (destructor)known_dealloc,
    .tp_methods = known_methods,
    .tp_getset = known_attributes,
};
