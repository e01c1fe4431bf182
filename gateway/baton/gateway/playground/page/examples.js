// The texts of the Example buttons.

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    title: { type: "string", maxLength: 60 },
    characters: { type: "array", items: { type: "string", maxLength: 20 }, maxItems: 3 },
    is_happy: { type: "boolean" },
  },
  required: ["title", "characters", "is_happy"],
  additionalProperties: false,
};

export const EXAMPLE_TOOLS = [
  {
    name: "get_weather",
    description: "The weather of a city now.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 40 }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
];
